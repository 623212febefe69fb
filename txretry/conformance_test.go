package txretry_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/txretry/conformance"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

var _ txretry.Transactor = (*txretry.Manager)(nil)

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Run(t, newBackend)
}

func TestConformanceBehindPgBouncer(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "a variant: all of it behind PgBouncer")
	conformance.Run(t, func(t *testing.T) conformance.Backend {
		t.Helper()
		direct := newCounter(t)
		return backendOn(t, pgtest.Behind(t, direct.Config().ConnString(), pgx.QueryExecModeExec))
	})
}

func newBackend(t *testing.T) conformance.Backend {
	t.Helper()
	b, _ := newBackendOn(t)
	return b
}

func newBackendOn(t *testing.T) (conformance.Backend, *pgxpool.Pool) {
	t.Helper()
	pool := newCounter(t)
	return backendOn(t, pool), pool
}

// backendOn needs a pool with a table of counters.
func backendOn(t *testing.T, pool *pgxpool.Pool) conformance.Backend {
	t.Helper()
	exec(t, pool, deferredFailure)
	return conformance.Backend{
		New:          func(cfg txretry.Config) txretry.Transactor { return newManager(t, pool, cfg) },
		Add:          add,
		Read:         func(ctx context.Context) (int, error) { return read(ctx, pool) },
		Fail:         fail,
		FailAtCommit: failAtCommit,
	}
}

// deferredFailure makes COMMIT fail with the SQLSTATE that was inserted.
const deferredFailure = `
	create table failure (sqlstate text);
	create function fail() returns trigger language plpgsql as $$ begin raise exception 'test' using errcode = new.sqlstate; end $$;
	create constraint trigger fail after insert on failure deferrable initially deferred for each row execute function fail()`

func failAtCommit(ctx context.Context, tx pgx.Tx, sqlstate string) error {
	_, err := tx.Exec(ctx, "insert into failure values ($1)", sqlstate)
	return err
}

func fail(ctx context.Context, tx pgx.Tx, sqlstate string) error {
	_, err := tx.Exec(ctx, fmt.Sprintf("do $$ begin raise exception 'test' using errcode = '%s'; end $$", sqlstate))
	return err
}

// Random calls have the same results on Postgres and on the fake, step by step, except for error texts. A sequence is
// determined by its number.
func TestDifferentialTransactions(t *testing.T) {
	t.Parallel()
	network := &losses{}
	real, fake := lossyBackend(t, network), fakeBackend()
	var committed, retried, unknown int
	for n := range testenv.Sequences(t, 60) {
		on, off := newSequence(real, n), newSequence(fake, n)
		on.run(t.Context())
		off.run(t.Context())
		if !slices.Equal(on.trace, off.trace) {
			t.Fatalf("sequence %d, on Postgres:\n%s\n\non the fake:\n%s", n, strings.Join(on.trace, "\n"), strings.Join(off.trace, "\n"))
		}
		committed, retried, unknown = committed+on.committed, retried+on.retried, unknown+on.unknown
	}
	t.Logf("%d calls committed, %d unknown, %d attempts repeated", committed, unknown, retried)
	if committed == 0 || unknown == 0 || retried == 0 {
		t.Error("too few calls to prove anything")
	}
}

// backend is a backend that can lose the replies to COMMIT.
type backend struct {
	conformance.Backend
	scripted func(cfg txretry.Config, script []txretrytest.Fault) txretry.Transactor
}

func lossyBackend(t *testing.T, network *losses) backend {
	t.Helper()
	b, pool := newBackendOn(t)
	cfg := pool.Config()
	cfg.ConnConfig.DialFunc = network.dial
	lossy := openPool(t, cfg)
	return backend{b, func(cfg txretry.Config, script []txretrytest.Fault) txretry.Transactor {
		network.script, network.attempts = script, 0
		m := newManager(t, lossy, cfg)
		m.SetWaits(time.Minute, time.Minute) // a repeated BEGIN would count as an attempt
		return m
	}}
}

func fakeBackend() backend {
	n := 0
	answer := func(sqlstate string) error {
		return &pgconn.PgError{Severity: "ERROR", Code: sqlstate, Message: "test"}
	}
	return backend{conformance.Backend{
		Add: func(_ context.Context, tx pgx.Tx, delta int) error {
			return txretrytest.Effect(tx, func() { n += delta }, func() { n -= delta })
		},
		Read: func(context.Context) (int, error) { return n, nil },
		Fail: func(_ context.Context, tx pgx.Tx, sqlstate string) error {
			return txretrytest.Fail(tx, answer(sqlstate))
		},
		FailAtCommit: func(_ context.Context, tx pgx.Tx, sqlstate string) error {
			if err := txretrytest.Effect(tx, func() {}, func() {}); err != nil { // it is a statement too
				return err
			}
			return txretrytest.EffectAtCommit(tx, func() error { return answer(sqlstate) }, nil, nil)
		},
	}, func(cfg txretry.Config, script []txretrytest.Fault) txretry.Transactor {
		return txretrytest.New(txretrytest.Config{Retry: cfg, Script: script})
	}}
}

const maxNesting = 3

// sequence makes random calls and records the result of every step.
type sequence struct {
	backend
	m       txretry.Transactor
	rng     *rand.Rand
	trace   []string
	handles []pgx.Tx // all handles so far, including stale ones
	hooks   int
	seen    seen

	committed, retried, unknown int
}

func newSequence(b backend, n int) *sequence {
	s := &sequence{backend: b, rng: rand.New(rand.NewPCG(7, uint64(n)))}
	script := make([]txretrytest.Fault, 20)
	for i := range script {
		if s.chance(10) {
			script[i].Point = oneOf(s, txretrytest.ReplyLostApplied, txretrytest.ReplyLostNotApplied)
		}
	}
	s.m = b.scripted(txretry.Config{
		BaseDelay: time.Microsecond, MaxDelay: time.Microsecond, Logger: quiet, CommitTimeout: time.Minute,
		XactStatus: oneOf(s, false, true), TracerProvider: tracerProvider{s: &s.seen},
	}, script)
	return s
}

func (s *sequence) note(format string, args ...any) {
	s.trace = append(s.trace, fmt.Sprintf(format, args...))
}

func (s *sequence) chance(percent int) bool { return s.rng.IntN(100) < percent }

func oneOf[T any](s *sequence, choices ...T) T { return choices[s.rng.IntN(len(choices))] }

// done records the span of a call.
func (s *sequence) done() {
	if s.seen.ended == 0 {
		return
	}
	outcome, attempts := s.seen.span["outcome"], s.seen.span["attempts"]
	s.note("done: %s, %s attempts, failed %q", outcome, attempts, s.seen.events)
	s.retried += len(s.seen.events)
	switch outcome {
	case "committed":
		s.committed++
	case "unknown":
		s.unknown++
	}
	s.seen = seen{}
}

func (s *sequence) run(ctx context.Context) {
	for range 3 {
		s.call(ctx)
		n, err := s.Read(ctx)
		s.note("counter %d, error %s", n, verdict(err))
	}
	if len(s.handles) > 0 {
		_ = s.step(ctx, maxNesting) // with a stale handle
	}
}

// call makes one call of Do. fn may panic.
func (s *sequence) call(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer s.done()
	defer func() {
		if p := recover(); p != nil {
			s.note("panic: %v", p)
		}
	}()
	opts := txretry.Options{
		MaxAttempts: s.rng.IntN(4), ReadOnly: s.chance(10), NoWait: s.chance(20), RetryConstraints: s.chance(20),
		Isolation: oneOf(s, "", pgx.ReadCommitted, pgx.RepeatableRead), SerialKey: oneOf(s, "", "key"),
	}
	if s.chance(3) {
		cancel()
	}
	s.note("call: %v", verdict(s.m.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		s.handles = append(s.handles, tx)
		return s.fn(ctx, cancel, 0)
	})))
}

var errOfFn = errors.New("error of fn")

// fn takes some steps and returns one of their errors, hides it, or ignores it.
func (s *sequence) fn(ctx context.Context, cancel func(), depth int) error {
	var last error
	for range 1 + s.rng.IntN(6) {
		if err := s.step(ctx, depth); err != nil {
			last = err
		}
	}
	switch s.rng.IntN(20) {
	case 0:
		panic("fn")
	case 1:
		cancel()
	case 2, 3:
		return errOfFn
	case 4, 5, 6, 7, 8:
		return last
	case 9, 10:
		if last != nil {
			return fmt.Errorf("%w: %v", errOfFn, last)
		}
	}
	return nil
}

// step makes one operation, usually with the newest handle.
func (s *sequence) step(ctx context.Context, depth int) (err error) {
	tx := s.handles[len(s.handles)-1]
	which := "newest"
	if s.chance(20) {
		n := s.rng.IntN(len(s.handles))
		tx, which = s.handles[n], fmt.Sprint(n)
	}
	what := "add"
	switch k := s.rng.IntN(20); k {
	default:
		err = s.Add(ctx, tx, 1+s.rng.IntN(9))
	case 0, 1:
		what = oneOf(s, "40001", "40P01", "55P03", "23505", "23514", "53100", "08006", "57014")
		err = s.Fail(ctx, tx, what)
	case 2:
		what = oneOf(s, "40001", "23505", "53100", "40003", "08006")
		err = s.FailAtCommit(ctx, tx, what)
		what += " at commit"
	case 3, 4, 5:
		what = "begin"
		var sp pgx.Tx
		if sp, err = tx.Begin(ctx); err == nil {
			s.handles = append(s.handles, sp)
		}
	case 6, 7:
		what, err = "commit", tx.Commit(ctx)
	case 8, 9, 10:
		what, err = "rollback", tx.Rollback(ctx)
	case 11, 12:
		s.hooks++
		n := s.hooks
		ok := txretry.AfterCommit(tx, func() { s.note("after commit %d", n) })
		what = fmt.Sprintf("hooks %d %v", n, ok)
	case 13, 14:
		if depth < maxNesting {
			what, err = "nested", s.nested(ctx, depth)
		}
	}
	s.note("%*s%s on %s: %s", 2*depth, "", what, which, verdict(err))
	return err
}

// nested makes a nested call, and may recover its panic.
func (s *sequence) nested(ctx context.Context, depth int) error {
	opts := txretry.Options{
		Savepoint: !s.chance(25), ReadOnly: s.chance(10), Isolation: oneOf(s, "", "", pgx.ReadCommitted, pgx.Serializable),
	}
	if s.chance(50) {
		defer func() {
			if p := recover(); p != nil {
				s.note("%*scaught %v", 2*depth, "", p)
			}
		}()
	}
	return s.m.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		s.handles = append(s.handles, tx)
		return s.fn(ctx, func() {}, depth+1)
	})
}

// verdict describes an error without its text.
func verdict(err error) string {
	if err == nil {
		return "none"
	}
	var told []string
	for name, is := range map[string]error{
		"closed": pgx.ErrTxClosed, "managed": txretry.ErrManaged, "nested": txretry.ErrNested, "rolled back": pgx.ErrTxCommitRollback,
		"canceled": context.Canceled, "deadline": context.DeadlineExceeded, "of fn": errOfFn, "silent": driver.ErrSilent,
	} {
		if errors.Is(err, is) {
			told = append(told, name)
		}
	}
	for name, as := range map[string]any{
		"lock timeout": new(*txretry.LockTimeoutError), "unavailable": new(*txretry.UnavailableError), "unknown": new(*txretry.CommitUnknownError),
	} {
		if errors.As(err, as) {
			told = append(told, name)
		}
	}
	var answer *pgconn.PgError
	if errors.As(err, &answer) {
		told = append(told, answer.Code)
	}
	slices.Sort(told)
	return fmt.Sprint(told)
}

// losses is a network that loses the reply to COMMIT, or COMMIT itself, in the attempts listed in a script of the
// fake. One transaction runs at a time.
type losses struct {
	script   []txretrytest.Fault
	attempts int
}

func (l *losses) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	return &lossyConn{Conn: conn, l: l, replied: make(chan struct{}, 1)}, err
}

type lossyConn struct {
	net.Conn
	l       *losses
	lost    atomic.Bool   // the reply is lost
	replied chan struct{} // it has arrived
}

// Read implements net.Conn. During a slow Write the client reads in the background, and must not get the lost reply, also
// if it began before the reply was lost.
func (c *lossyConn) Read(p []byte) (int, error) {
	if c.lost.Load() {
		return 0, io.ErrClosedPipe
	}
	n, err := c.Conn.Read(p)
	if c.lost.Load() {
		c.reply()
		return 0, io.ErrClosedPipe
	}
	return n, err
}

func (c *lossyConn) reply() {
	select {
	case c.replied <- struct{}{}:
	default:
	}
}

func (c *lossyConn) Write(p []byte) (int, error) {
	switch {
	case bytes.Contains(p, []byte("begin isolation")):
		c.l.attempts++
	case commits(p) && c.l.attempts <= len(c.l.script):
		return c.commit(p, c.l.script[c.l.attempts-1].Point)
	}
	return c.Conn.Write(p)
}

// commits reports whether the client sends COMMIT: by itself, or prepared, behind the statement that reads the marks of
// nested calls.
func commits(p []byte) bool {
	digest := sha256.Sum256([]byte("commit"))
	prepared := fmt.Appendf(nil, "stmtcache_%x", digest[:24]) // as pgx calls it
	execute := []byte("\x00E\x00\x00\x00\t")
	return bytes.HasSuffix(p, []byte("\x0bcommit\x00")) || bytes.Contains(p, prepared) && bytes.Contains(p, execute)
}

func (c *lossyConn) commit(p []byte, fault txretrytest.Point) (n int, err error) {
	switch fault {
	case txretrytest.ReplyLostNotApplied:
		_ = c.Conn.Close()
		return 0, io.ErrClosedPipe
	case txretrytest.ReplyLostApplied:
		c.lost.Store(true)
		if n, err = c.Conn.Write(p); err == nil {
			go func() {
				_, _ = c.Conn.Read(make([]byte, 1<<16)) // discards the reply
				c.reply()
			}()
			<-c.replied
		}
		_ = c.Conn.Close()
		return n, err
	}
	return c.Conn.Write(p)
}
