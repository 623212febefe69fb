package txretrytest_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// With random faults, each call that queues for a key returns the outcome of its own work. No call waits forever (the
// bubble would report it), and the keys are free afterwards.
func TestSerialKey_randomSchedules(t *testing.T) {
	t.Parallel()
	for seed := range uint64(150) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { newSchedule(t, seed).run() })
		})
	}
}

// dice is a random source for all goroutines of a schedule.
type dice struct {
	mu   sync.Mutex
	rand *rand.Rand
}

func (d *dice) throw(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rand.IntN(n)
}

// schedule is a random run of calls on one manager.
type schedule struct {
	*testing.T
	*dice
	m     *txretrytest.Manager
	calls []*scheduled
	runs  int
	stale pgx.Tx // the handle of the last fn
}

func newSchedule(t *testing.T, seed uint64) *schedule {
	s := &schedule{T: t, dice: &dice{rand: rand.New(rand.NewPCG(seed, 0))}}
	cfg := txretrytest.Config{Retry: txretry.Config{XactStatus: s.throw(2) == 0, Logger: slog.New(slog.DiscardHandler)}}
	for range 60 {
		cfg.Script = append(cfg.Script, faults[s.throw(len(faults))])
	}
	if s.throw(3) == 0 {
		cfg.Retry.TracerProvider = badTracing{tracer: &badTracer{dice: s.dice}}
	}
	s.m = txretrytest.New(cfg)
	for range 2 + s.throw(12) {
		s.calls = append(s.calls, &scheduled{schedule: s, key: keys[s.throw(4)/3]})
	}
	return s
}

var faults = append(make([]txretrytest.Fault, 12), // most attempts have no fault
	txretrytest.Fault{Point: txretrytest.AtBegin, SQLSTATE: "40001"},
	txretrytest.Fault{Point: txretrytest.AtBegin, SQLSTATE: "53300"},
	txretrytest.Fault{Point: txretrytest.AtStatement, Statement: 1, SQLSTATE: "40001"},
	txretrytest.Fault{Point: txretrytest.AtStatement, Statement: 3, SQLSTATE: "55P03"},
	txretrytest.Fault{Point: txretrytest.AtStatement, Statement: 4, SQLSTATE: "57P01"},
	txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"},
	txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "23505"},
	txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "08006"},
	txretrytest.Fault{Point: txretrytest.ReplyLostApplied},
	txretrytest.Fault{Point: txretrytest.ReplyLostNotApplied},
)

// badTracing panics sometimes.
type badTracing struct {
	noop.TracerProvider
	tracer *badTracer
}

func (b badTracing) Tracer(string, ...trace.TracerOption) trace.Tracer { return b.tracer }

type badTracer struct {
	noop.Tracer
	dice *dice
}

func (b *badTracer) Start(ctx context.Context, _ string, _ ...trace.SpanStartOption) (context.Context, trace.Span) {
	b.panic()
	span := badSpan{tracer: b}
	return trace.ContextWithSpan(ctx, span), span
}

func (b *badTracer) panic() {
	if b.dice.throw(40) == 0 {
		panic("tracer")
	}
}

type badSpan struct {
	noop.Span
	tracer *badTracer
}

func (b badSpan) IsRecording() bool          { return true }
func (b badSpan) End(...trace.SpanEndOption) { b.tracer.panic() }

func (s *schedule) run() {
	var all sync.WaitGroup
	for _, c := range s.calls {
		all.Go(c.call)
		if c.throw(2) == 0 {
			time.Sleep(time.Duration(c.throw(3)) * time.Millisecond) // timing: in a bubble
		}
		synctest.Wait()
	}
	all.Wait()
	for i, c := range s.calls {
		if wrong := c.wrong(); wrong != "" {
			s.Errorf("call %d returned %s: error %v, panic %v; effects %d, at COMMIT %d (%v), after it %d",
				i, wrong, c.err, c.panicked, c.now, c.then, c.atCommit, c.hooks)
		}
	}
	s.inOrder()
	for _, key := range keys {
		all.Go((&scheduled{schedule: s, key: key}).call)
		all.Wait()
	}
}

var keys = []string{"k", "l"}

// inOrder checks that the committed calls of a key committed in the order of their arrival.
func (s *schedule) inOrder() {
	last := map[string]int{}
	for i, c := range s.calls {
		if c.err != nil {
			continue
		}
		if c.ran < last[c.key] {
			s.Errorf("call %d was overtaken", i)
		}
		last[c.key] = c.ran
	}
}

// scheduled is one of the calls, with its results.
type scheduled struct {
	*schedule
	key    string
	cancel context.CancelFunc

	ran              int // the number of the last run
	err              error
	panicked         any  // the value of Do's panic
	atCommit         bool // the last run had work for COMMIT
	now, then, hooks int  // lasting effects: of fn, at COMMIT, after it
}

func (c *scheduled) call() {
	ctx, cancel := context.WithCancel(c.Context())
	defer cancel()
	c.cancel = cancel
	if c.throw(5) == 0 {
		time.AfterFunc(time.Duration(c.throw(8))*time.Millisecond, cancel) // timing: in a bubble
	}
	opts := txretry.Options{
		SerialKey:   c.key,
		MaxAttempts: 1 + c.throw(3),
	}
	c.err = errNoReturn
	defer func() { c.panicked = recover() }()
	c.err = c.m.DoWith(ctx, opts, c.fn)
}

var (
	errNoReturn = errors.New("Do did not return")
	errOwn      = errors.New("business error")
)

func (c *scheduled) fn(ctx context.Context, tx pgx.Tx) error {
	if c.stale != nil && !errors.Is(txretrytest.Effect(c.stale, func() {}, func() {}), pgx.ErrTxClosed) {
		c.Error("a handle is open after its fn")
	}
	c.runs++
	c.ran, c.stale, c.atCommit = c.runs, tx, c.throw(2) == 0
	txretry.AfterCommit(tx, func() { c.hooks++ })
	if c.atCommit {
		refused := c.throw(12) == 0
		apply := func() error {
			if refused {
				return &pgconn.PgError{Severity: "ERROR", Code: "23503"}
			}
			c.then++
			return nil
		}
		if err := txretrytest.EffectAtCommit(tx, apply, func() { c.then-- }, nil); err != nil {
			return err
		}
	}
	if err := txretrytest.Effect(tx, func() { c.now++ }, func() { c.now-- }); err != nil {
		return err
	}
	time.Sleep(time.Duration(c.throw(2)) * time.Millisecond) // timing: in a bubble
	return c.end(ctx, tx)
}

// end ends a run; most runs succeed.
func (c *scheduled) end(ctx context.Context, tx pgx.Tx) error {
	switch c.throw(24) {
	case 0:
		return errOwn
	case 1:
		panic("fn")
	case 2:
		runtime.Goexit()
	case 3:
		return txretrytest.Fail(tx, &pgconn.PgError{Severity: "ERROR", Code: "40P01"})
	case 4:
		_ = txretrytest.Fail(tx, &pgconn.PgError{Severity: "ERROR", Code: "23505"})
	case 5:
		c.cancel()
	case 6:
		c.cancel()
		return ctx.Err()
	case 7, 8:
		_ = c.m.DoWith(ctx, txretry.Options{Savepoint: true}, func(ctx context.Context, tx pgx.Tx) error {
			txretry.AfterCommit(tx, func() { c.hooks += 100 })
			return errors.Join(txretrytest.Effect(tx, func() { c.now += 100 }, func() { c.now -= 100 }), errOwn)
		})
	case 9:
		_, err := tx.Begin(ctx) // left open
		return err
	}
	return nil
}

// wrong compares the result of the call with its lasting effects, and returns "" if they agree.
func (c *scheduled) wrong() string {
	then := 0
	if c.atCommit {
		then = c.now
	}
	done := c.now == 1 && c.then == then
	undone := c.now == 0 && c.then == 0
	_, unknown := errors.AsType[*txretry.CommitUnknownError](c.err)
	told, right := "rolled back", undone && c.hooks == 0
	switch {
	case c.err == nil, c.panicked == "tracer" && c.hooks > 0:
		told, right = "committed", done && c.hooks == 1
	case unknown, c.panicked == "tracer":
		told, right = "nothing", (done || undone) && c.hooks == 0
	}
	if right {
		return ""
	}
	return told
}

// Struck is called when a fault happens, but not if the attempt ends before the fault.
func TestStruck(t *testing.T) {
	t.Parallel()
	script := []txretrytest.Fault{
		{Point: txretrytest.AtStatement, Statement: 1, SQLSTATE: "40001"}, // there is no statement
		{Point: txretrytest.AtBegin, SQLSTATE: "40001"},
		{Point: txretrytest.AtEnd, SQLSTATE: "40001"},
		{Point: txretrytest.AtCommit, SQLSTATE: "40001"},
		{},
		{Point: txretrytest.ReplyLostApplied},
		{Point: txretrytest.ReplyLostNotApplied},
	}
	var struck []int
	m := txretrytest.New(txretrytest.Config{Script: script, Retry: txretry.Config{Rand: func() float64 { return 0 }}, Struck: func(attempt int, f txretrytest.Fault) {
		if f != script[attempt] {
			t.Errorf("attempt %d met %+v, want %+v", attempt, f, script[attempt])
		}
		struck = append(struck, attempt)
	}})
	for m.Stats().Attempts < len(script) {
		_ = m.Do(t.Context(), func(context.Context, pgx.Tx) error { return nil }) // the last two are unknown
	}
	if want := []int{1, 2, 3, 5, 6}; !slices.Equal(struck, want) {
		t.Errorf("faults happened in the attempts %v, want %v", struck, want)
	}
}

func scripted(faults ...txretrytest.Fault) *txretrytest.Manager {
	return txretrytest.New(txretrytest.Config{Script: faults})
}

// After some errors of COMMIT, the outcome is unknown.
func TestScriptedCommitIsUnknown(t *testing.T) {
	t.Parallel()
	for _, sqlstate := range []string{"08006", "40003", "57P01"} {
		n := 0
		err := scripted(txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: sqlstate}).Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
			return txretrytest.Effect(tx, func() { n++ }, func() { n-- })
		})
		var unknown *txretry.CommitUnknownError
		if !errors.As(err, &unknown) || n != 0 {
			t.Errorf("%s: error %v, %d applied; want *CommitUnknownError and none", sqlstate, err, n)
		}
	}
}

// A server that shuts down closes the connection. A savepoint does not help.
func TestScriptedShutdown(t *testing.T) {
	t.Parallel()
	n := 0
	add := func(tx pgx.Tx) error { return txretrytest.Effect(tx, func() { n++ }, func() { n-- }) }
	m := scripted(txretrytest.Fault{Point: txretrytest.AtStatement, Statement: 2, SQLSTATE: "57P01"})
	err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if err := add(tx); err != nil {
			return err
		}
		if pgx.BeginFunc(ctx, tx, add) == nil {
			t.Error("a statement continued")
		}
		if add(tx) == nil || tx.QueryRow(ctx, "select 1").Scan() == nil {
			t.Error("a statement was run on a closed connection")
		}
		return nil
	})
	var unavailable *txretry.UnavailableError
	if !errors.As(err, &unavailable) || !errors.Is(err, pgx.ErrTxCommitRollback) || n != 0 {
		t.Errorf("error %v, %d applied; want *UnavailableError of a rollback and none", err, n)
	}
	if got, want := m.Stats(), (txretrytest.Stats{Attempts: 1, Rollbacks: 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// The end of a nested call is not the end of fn.
func TestScriptedEndIsNotNested(t *testing.T) {
	t.Parallel()
	m := scripted(txretrytest.Fault{Point: txretrytest.AtEnd, SQLSTATE: "40001"})
	outer, inner := 0, 0
	err := m.Do(t.Context(), func(ctx context.Context, _ pgx.Tx) error {
		outer++
		err := m.DoWith(ctx, txretry.Options{Savepoint: true}, func(context.Context, pgx.Tx) error {
			inner++
			return nil
		})
		if err != nil {
			t.Errorf("the nested call: %v", err)
		}
		return err
	})
	if err != nil || outer != 2 || inner != 2 {
		t.Errorf("error %v after %d and %d calls, want two of each", err, outer, inner)
	}
}

func lost(p txretrytest.Point) []txretrytest.Fault {
	return []txretrytest.Fault{{Point: p}, {Point: p}}
}

// asked is a Witness with a fixed result.
func asked(committed bool, err error) txretry.Options {
	return txretry.Options{Witness: func(context.Context, pgx.Tx) (bool, error) { return committed, err }}
}

func TestResolve(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name       string
		point      txretrytest.Point
		xactStatus bool
		opts       txretry.Options
		known      bool
		calls      int
		n          int
	}{
		{"status, applied", txretrytest.ReplyLostApplied, true, txretry.Options{}, true, 1, 1},
		{"status, not applied, then retried", txretrytest.ReplyLostNotApplied, true, txretry.Options{}, true, 3, 1},
		{"witness finds it", txretrytest.ReplyLostApplied, false, asked(true, nil), true, 1, 1},
		{"witness proves absence", txretrytest.ReplyLostNotApplied, false, asked(false, nil), true, 3, 1},
		{"witness before status", txretrytest.ReplyLostApplied, true, asked(false, errors.New("no")), false, 1, 1},
		{"witness fails", txretrytest.ReplyLostNotApplied, false, asked(false, errors.New("no")), false, 1, 0},
		{"nobody asks", txretrytest.ReplyLostApplied, false, txretry.Options{}, false, 1, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var c counter
				m := txretrytest.New(txretrytest.Config{Script: lost(tt.point), Retry: txretry.Config{XactStatus: tt.xactStatus}})
				calls, committed := 0, 0
				err := m.DoWith(t.Context(), tt.opts, func(ctx context.Context, tx pgx.Tx) error {
					calls++
					txretry.AfterCommit(tx, func() { committed++ })
					return c.Add(ctx, tx, 1)
				})
				if calls != tt.calls || c.value() != tt.n {
					t.Errorf("%d calls, counter %d; want %d, %d", calls, c.value(), tt.calls, tt.n)
				}
				var unknown *txretry.CommitUnknownError
				if errors.As(err, &unknown) == tt.known || (err == nil) != tt.known || (committed == 1) != tt.known {
					t.Errorf("error %v, %d functions run", err, committed)
				}
				if !tt.known && (unknown.Code() != "COMMIT_UNKNOWN" || unknown.HTTPStatus() != 500) {
					t.Errorf("maps to %d %s", unknown.HTTPStatus(), unknown.Code())
				}
				if errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("error %v contains the error of the caller's context", err)
				}
			})
		})
	}
}

// The COMMIT of the last attempt was lost, and found rolled back. This is neither a lock timeout nor an unknown
// outcome.
func TestResolvedWithoutAttemptsLeft(t *testing.T) {
	t.Parallel()
	m := txretrytest.New(txretrytest.Config{
		Script: lost(txretrytest.ReplyLostNotApplied),
		Retry:  txretry.Config{MaxAttempts: 1, XactStatus: true},
	})
	err := m.Do(t.Context(), func(context.Context, pgx.Tx) error { return nil })
	var unknown *txretry.CommitUnknownError
	var timeout *txretry.LockTimeoutError
	if err == nil || errors.As(err, &unknown) || errors.As(err, &timeout) {
		t.Errorf("error %v", err)
	}
}

// The rows that a Witness writes never stay. The manager calls it for ten seconds.
func TestWitness_leavesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var c counter
		asked := 0
		m := txretrytest.New(txretrytest.Config{Script: lost(txretrytest.ReplyLostApplied)})
		start := time.Now()
		err := m.DoWith(t.Context(), txretry.Options{Witness: func(ctx context.Context, tx pgx.Tx) (bool, error) {
			asked++
			return false, errors.Join(c.Add(ctx, tx, 1000), errors.New("outcome not found"))
		}}, func(ctx context.Context, tx pgx.Tx) error { return c.Add(ctx, tx, 1) })
		var unknown *txretry.CommitUnknownError
		if waited := time.Since(start); !errors.As(err, &unknown) || waited != 10*time.Second || asked < 20 {
			t.Errorf("error %v after %v, asked %d times", err, waited, asked)
		}
		if got := m.Stats(); got != (txretrytest.Stats{Attempts: 1, Commits: 1}) || c.value() != 1 {
			t.Errorf("stats %+v, counter %d: the witness left something", got, c.value())
		}
	})
}
