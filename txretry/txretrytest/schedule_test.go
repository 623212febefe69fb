package txretrytest_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"runtime"
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

// Under random faults each call that queues for a key returns the outcome of its own work, none is left
// waiting (the bubble would notice), and the keys are free afterwards.
func TestSerialKey_randomSchedules(t *testing.T) {
	t.Parallel()
	for seed := range uint64(150) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { newSchedule(t, seed).run() })
		})
	}
}

// dice are thrown by all goroutines of a schedule.
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
	stale pgx.Tx // the handle of the fn that ran last
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

var faults = append(make([]txretrytest.Fault, 12), // most attempts meet none
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

// badTracing panics now and then.
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
			s.Errorf("call %d was told %s: error %v, panic %v; effects %d, at COMMIT %d (%v), after it %d",
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

// inOrder checks that those of a key that have committed did so in the order in which they came.
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

// scheduled is one of the calls, and what it did.
type scheduled struct {
	*schedule
	key    string
	cancel context.CancelFunc

	ran              int // the number of the last run
	err              error
	panicked         any  // what came out of Do
	atCommit         bool // the last run had work for COMMIT
	now, then, hooks int  // effects that last: of fn, at COMMIT, after it
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

// end is how a run ends; most succeed.
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
		_, err := tx.Begin(ctx) // and left open
		return err
	}
	return nil
}

// wrong compares what the call was told with what has lasted, and returns "" if the two agree.
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
