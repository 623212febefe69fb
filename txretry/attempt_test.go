package txretry_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestSerializationFailureAtStatement(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	cfg, retries := observed()
	first := true
	err := newManager(t, pool, cfg).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		var n int
		if err := tx.QueryRow(ctx, "select n from counter where id = 1").Scan(&n); err != nil {
			return err
		}
		if first {
			first = false
			exec(t, pool, "update counter set n = n + 10 where id = 1")
		}
		_, err := tx.Exec(ctx, "update counter set n = $1 where id = 1", n+1)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	retries.want(t, "40001", "fn")
	wantCounter(t, pool, 11)
}

// Two transactions each read both rows and write one: write skew.
func TestSerializationFailureAtCommit(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	cfg, retries := observed()
	m := newManager(t, pool, cfg)
	skew := func(ctx context.Context, tx pgx.Tx, id int) error {
		var sum int
		if err := tx.QueryRow(ctx, "select sum(n) from counter where id in (1, 2)").Scan(&sum); err != nil || sum > 0 {
			return err
		}
		_, err := tx.Exec(ctx, "update counter set n = 1 where id = $1", id)
		return err
	}
	first := true
	err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if err := skew(ctx, tx, 1); err != nil || !first {
			return err
		}
		first = false
		return m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return skew(ctx, tx, 2) })
	})
	if err != nil {
		t.Fatal(err)
	}
	retries.want(t, "40001", "commit")
	wantCounter(t, pool, 0)
}

func TestDeadlock(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	cfg, retries := observed()
	cfg.Isolation = pgx.ReadCommitted
	m := newManager(t, pool, cfg)
	var bothHold sync.WaitGroup
	bothHold.Add(2)
	lock := func(first, second int) error {
		retry := false
		return m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			first, second := first, second
			if retry {
				// The other transaction holds the second row and waits for the first, which this one has just
				// released. This one could lock the first row again before the other wakes up, and they would
				// deadlock once more.
				first, second = second, first
			}
			if _, err := tx.Exec(ctx, "update counter set n = n + 1 where id = $1", first); err != nil {
				return err
			}
			if !retry {
				retry = true
				bothHold.Done()
				bothHold.Wait()
			}
			_, err := tx.Exec(ctx, "update counter set n = n + 1 where id = $1", second)
			return err
		})
	}
	other := make(chan error, 1)
	go func() { other <- lock(2, 1) }()
	if err := errors.Join(lock(1, 2), <-other); err != nil {
		t.Fatal(err)
	}
	retries.want(t, "40P01", "fn")
	wantCounter(t, pool, 2)
}

func TestLockTimeout(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"lock_timeout": "select from counter where id = 1 for update",
		"nowait":       "select from counter where id = 1 for update nowait",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			blocker, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = blocker.Rollback(context.WithoutCancel(t.Context())) }()
			if err := add(t.Context(), blocker, 1); err != nil {
				t.Fatal(err)
			}
			cfg, retries := observed()
			opts := txretry.Options{LockTimeout: 30 * time.Millisecond, MaxAttempts: 2}
			err = newManager(t, pool, cfg).DoWith(t.Context(), opts, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, sql)
				return err
			})
			var timeout *txretry.LockTimeoutError
			if !errors.As(err, &timeout) || len(timeout.Attempts) != 2 {
				t.Fatalf("error %v, want *LockTimeoutError after 2 attempts", err)
			}
			retries.want(t, "55P03", "fn")
		})
	}
}

// wantCancelled checks that a call ended with its context, without effect.
func wantCancelled(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want the error of the context", err)
	}
	var unknown *txretry.CommitUnknownError
	if errors.As(err, &unknown) {
		t.Errorf("error %v, want a known outcome", err)
	}
}

// The context ends while the call waits for its key, for a connection, for the reply to BEGIN, or for a reply to fn.
// The call has no effect, and the connection stays usable.
func TestCancelled(t *testing.T) {
	t.Parallel()
	notRun := func(context.Context, pgx.Tx) error { return errors.New("fn was run") }
	for name, test := range map[string]struct {
		disturb func(t *testing.T, pool *pgxpool.Pool, proxy *testenv.Proxy) (settle func())
		fn      func(ctx context.Context, tx pgx.Tx) error
	}{
		"in acquire": {func(t *testing.T, pool *pgxpool.Pool, _ *testenv.Proxy) func() {
			conn, err := pool.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return conn.Release
		}, notRun},
		"in BEGIN": {func(_ *testing.T, _ *pgxpool.Pool, proxy *testenv.Proxy) func() {
			proxy.Pause()
			return proxy.Resume
		}, notRun},
		"in fn": {func(*testing.T, *pgxpool.Pool, *testenv.Proxy) func() { return func() {} }, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select pg_sleep(60)")
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct, pool, proxy := behindProxy(t, 1, addOne)
			m := newManager(t, pool, txretry.Config{})
			settle := test.disturb(t, pool, proxy)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond) // timing: must pass
			defer cancel()
			wantCancelled(t, m.Do(ctx, test.fn))
			settle()
			if err := m.Do(t.Context(), addOne); err != nil {
				t.Errorf("afterwards: %v", err)
			}
			wantCounter(t, direct, 2)
		})
	}
}

// heldCommit makes each COMMIT that has changed the counter wait until release is called.
func heldCommit(t *testing.T, pool *pgxpool.Pool) (release func()) {
	t.Helper()
	const key = "hashtext(current_schema())"
	exec(t, pool, `create function dawdle() returns trigger language plpgsql as
			$$ begin perform pg_advisory_xact_lock(`+key+`); return null; end $$;
		create constraint trigger dawdle after update on counter deferrable initially deferred
			for each row execute function dawdle()`)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, err = conn.Exec(t.Context(), "select pg_advisory_lock("+key+")")
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if _, err := conn.Exec(context.WithoutCancel(t.Context()), "select pg_advisory_unlock_all()"); err != nil {
			t.Error(err)
		}
		conn.Release()
	}
}

// whileCommitting waits until a COMMIT waits for release, and checks a value of that session.
func whileCommitting(t *testing.T, pool *pgxpool.Pool, pid uint32, value string) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var done bool
		err := pool.QueryRow(t.Context(), "select "+value+" from pg_stat_activity where pid = $1 and query = 'commit' and wait_event = 'advisory'", pid).Scan(&done)
		if err == nil && !done {
			err = errors.New("the session does not have the value")
		}
		return err
	})
}

// COMMIT continues: a cancelled context does not make its outcome unknown.
func TestCancelledInCommit(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	release := heldCommit(t, pool)
	pgtest.Idle(t, pool, 2) // the goroutine below need not wait for a connection
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	committed := false
	opts := txretry.Options{CommitTimeout: time.Minute, LockTimeout: testenv.Patience}
	err := newManager(t, pool, txretry.Config{}).DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		txretry.AfterCommit(tx, func() { committed = ctx.Err() != nil })
		pid := pidOf(t, tx)
		go func() {
			defer release()
			whileCommitting(t, pool, pid, "true")
			cancel()
		}()
		return add(ctx, tx, 1)
	})
	if err != nil || !committed {
		t.Errorf("error %v, committed under a cancelled context: %v", err, committed)
	}
	wantCounter(t, pool, 1)
}

// A call holds no connection while it waits for its next attempt.
func TestConnectionsAreFreeBetweenAttempts(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	cfg, _ := observed()
	cfg.Rand = func() float64 { // called just before the delay
		if n := pool.Stat().AcquiredConns(); n != 0 {
			t.Errorf("%d connections are held before the delay", n)
		}
		return 0
	}
	calls := 0
	err := newManager(t, pool, cfg).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if calls++; calls == 1 {
			return fail(ctx, tx, "40001")
		}
		return nil
	})
	if err != nil || calls != 2 {
		t.Errorf("error %v after %d calls", err, calls)
	}
}

// In the simple protocol, pgx accepts several statements as one. Their replies hide the reply of COMMIT. A commit is
// never reported as a rollback.
func TestAtCommitWithSeveralStatements(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		err := m.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
			txretry.AtCommit(tx, "update counter set n = 1 where id = 1; update counter set n = 2 where id = 2")
			return nil
		})
		var unknown *txretry.CommitUnknownError
		if !errors.As(err, &unknown) {
			checkNotApplied(t, pool)
		}
	})
}

func checkNotApplied(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if n, err := read(context.WithoutCancel(t.Context()), pool); err != nil || n != 0 {
		t.Errorf("reported as rolled back, but the counter is %d (error %v)", n, err)
	}
}

// faultyTracer panics after the reply to COMMIT.
type faultyTracer struct{}

func (faultyTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, faultyTracer{}, data.SQL)
}

func (faultyTracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if ctx.Value(faultyTracer{}) == "commit" {
		panic("boom")
	}
}

// User code may run inside COMMIT. If it panics, the outcome is unknown, and the connection keeps no deadline.
func TestPanicDuringCommit(t *testing.T) {
	t.Parallel()
	direct := newCounter(t)
	cfg := direct.Config()
	cfg.MaxConns = 1
	cfg.ConnConfig.Tracer = faultyTracer{}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var s seen
	m := newManager(t, pool, txretry.Config{CommitTimeout: time.Second, TracerProvider: tracerProvider{s: &s}})
	func() {
		defer func() {
			if recover() != "boom" {
				t.Error("Do did not panic")
			}
		}()
		_ = m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			return add(ctx, tx, 1)
		})
	}()
	wantCounter(t, direct, 1)
	if got := s.span["outcome"]; got != "unknown" {
		t.Errorf("outcome %s, want unknown", got)
	}
	if _, err := pool.Exec(t.Context(), "select pg_sleep(1.2)"); err != nil {
		t.Errorf("the connection was released with the deadline of COMMIT: %v", err)
	}
}

func TestBackendTerminated(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		swallow bool
		check   func(t *testing.T, err error)
	}{
		"at a statement": {false, func(t *testing.T, err error) { wantSQLSTATE(t, err, "57P01") }},
		"before COMMIT": {true, func(t *testing.T, err error) {
			var unavailable *txretry.UnavailableError
			if !errors.As(err, &unavailable) { // on a slow machine, the loss is found before COMMIT
				wantUnknown(t, err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			calls := 0
			err := newManager(t, pool, txretry.Config{MaxAttempts: 1}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				calls++
				if err := add(ctx, tx, 1); err != nil {
					return err
				}
				pid := pidOf(t, tx)
				exec(t, pool, "select pg_terminate_backend($1, 5000)", pid)
				if test.swallow {
					return nil
				}
				return add(ctx, tx, 1)
			})
			test.check(t, err)
			if calls != 1 {
				t.Errorf("fn ran %d times, want once", calls)
			}
			wantCounter(t, pool, 0)
		})
	}
}

// A statement lost the connection, and fn ignored its error. The transaction is definitely rolled back: COMMIT is not
// sent.
func TestConnectionLostBeforeCommit(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	err := newManager(t, pool, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "select pg_terminate_backend(pg_backend_pid())")
		wantSQLSTATE(t, err, "57P01")
		return nil
	})
	if !errors.Is(err, pgx.ErrTxCommitRollback) {
		t.Errorf("error %v, want one that is pgx.ErrTxCommitRollback", err)
	}
	wantSQLSTATE(t, err, "57P01")
}

func TestCommitReplyLost(t *testing.T) {
	t.Parallel()
	for name, atCommit := range map[string]bool{"alone": false, "with AtCommit": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := newCounter(t)
			proxy := testenv.NewProxy(t, direct.Config().ConnString())
			pool := pgtest.Pool(t, proxy.URL(), 2)
			m := newManager(t, pool, txretry.Config{CommitTimeout: time.Minute})
			m.SetWaits(time.Minute, time.Minute) // a repeated BEGIN would have no prepared statements
			work := func(ctx context.Context, tx pgx.Tx) error {
				if atCommit {
					txretry.AtCommit(tx, "update counter set n = n + $1 where id = 1", 1)
					return nil
				}
				return add(ctx, tx, 1)
			}
			// A first round prepares the statements, so that the second takes one round trip.
			if err := m.Do(t.Context(), work); err != nil {
				t.Fatal(err)
			}
			go func() {
				for n := 0; n < 2 && t.Context().Err() == nil; {
					n, _ = read(t.Context(), direct)
				}
				proxy.Cut()
			}()
			calls := 0
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				calls++
				txretry.AfterCommit(tx, func() { t.Error("AfterCommit ran without an answer") })
				defer proxy.DropReplies()
				return work(ctx, tx)
			})
			wantUnknown(t, err)
			if calls != 1 {
				t.Errorf("fn ran %d times, want once", calls)
			}
			eventuallyCounter(t, direct, 2)
		})
	}
}

func TestFnEndsTheTransaction(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{"commit", "rollback"} {
		t.Run(sql, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			calls := 0
			err := newManager(t, pool, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				calls++
				txretry.AfterCommit(tx, func() { t.Error("AfterCommit ran") })
				if _, err := tx.Exec(ctx, sql); err != nil {
					return err
				}
				return &pgconn.PgError{Code: "40001"}
			})
			if !errors.Is(err, txretry.ErrManaged) || calls != 1 {
				t.Errorf("error %v after %d calls, want ErrManaged after one", err, calls)
			}
		})
	}
}

// The result of fn's own statement is unknown, so no function runs.
func TestFnEndsTheTransactionAndPanics(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	var s seen
	m := newManager(t, pool, txretry.Config{TracerProvider: tracerProvider{s: &s}})
	func() {
		defer func() { _ = recover() }()
		_ = m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			txretry.AfterCommit(tx, func() { t.Error("AfterCommit ran") })
			_, _ = tx.Exec(ctx, "commit")
			panic("boom")
		})
	}()
	if got := s.span["outcome"]; got != "unknown" {
		t.Errorf("outcome %s", got)
	}
}

func TestRowsLeftOpen(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	err := newManager(t, pool, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if err := add(ctx, tx, 1); err != nil {
			return err
		}
		_, err := tx.Query(ctx, "select generate_series(1, 100000)")
		return err
	})
	if !errors.Is(err, pgx.ErrTxCommitRollback) {
		t.Errorf("error %v, want one that is pgx.ErrTxCommitRollback", err)
	}
	wantCounter(t, pool, 0)
}

// gone waits until the server has ended a session.
func gone(t *testing.T, pool *pgxpool.Pool, pid uint32) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var n int
		err := pool.QueryRow(t.Context(), "select count(*) from pg_stat_activity where pid = $1", pid).Scan(&n)
		if err == nil && n > 0 {
			err = errors.New("still there")
		}
		return err
	})
}

// The server closes the connection of a transaction in which fn is idle. If fn has taken long, this is found before
// COMMIT, and COMMIT is not sent.
func TestIdleTimeout(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{IdleTimeout: 50 * time.Millisecond})
	calls := 0
	err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		calls++
		late := time.After(1100 * time.Millisecond) // timing: a second of silence causes a ping before COMMIT
		gone(t, pool, pidOf(t, tx))
		<-late
		return nil
	})
	wantSQLSTATE(t, err, "25P03")
	if calls != 1 {
		t.Errorf("fn ran %d times", calls)
	}
}

// A connection lost while fn did something else is found before COMMIT. The outcome is then known, and the
// transaction can be retried.
func TestConnectionLostWhileIdle(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{})
	calls := 0
	err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if calls++; calls > 1 {
			return add(ctx, tx, 1)
		}
		late := time.After(1100 * time.Millisecond) // timing: a second of silence causes a ping before COMMIT
		exec(t, pool, "select pg_terminate_backend($1, 5000)", pidOf(t, tx))
		<-late
		return nil
	})
	if err != nil || calls != 2 {
		t.Errorf("error %v after %d calls", err, calls)
	}
	wantCounter(t, pool, 1)
}

// seen records the span of one call at a time.
type seen struct {
	span   map[string]string
	events []string
	ended  int

	attempts []*seen
}

type tracerProvider struct {
	noop.TracerProvider
	s *seen
}

func (p tracerProvider) Tracer(string, ...trace.TracerOption) trace.Tracer { return tracer{s: p.s} }

type tracer struct {
	noop.Tracer
	s *seen
}

func (t tracer) Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	if name == "txretry.attempt" {
		attempt := span{s: &seen{span: map[string]string{}}}
		cfg := trace.NewSpanStartConfig(opts...)
		attempt.SetAttributes(cfg.Attributes()...)
		t.s.attempts = append(t.s.attempts, attempt.s)
		return trace.ContextWithSpan(ctx, attempt), attempt
	}
	t.s.span = map[string]string{"name": name}
	span := span{s: t.s}
	return trace.ContextWithSpan(ctx, span), span
}

type span struct {
	noop.Span
	s *seen
}

func (span) IsRecording() bool            { return true }
func (s span) End(...trace.SpanEndOption) { s.s.ended++ }
func (s span) SetAttributes(kvs ...attribute.KeyValue) {
	for _, kv := range kvs {
		s.s.span[strings.TrimPrefix(string(kv.Key), "holdfast.")] = kv.Value.String()
	}
}

func (s span) AddEvent(_ string, opts ...trace.EventOption) {
	cfg := trace.NewEventConfig(opts...)
	set := attribute.NewSet(cfg.Attributes()...)
	s.s.events = append(s.s.events, set.Encoded(attribute.DefaultEncoder()))
}

func TestTelemetry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s seen
		var metrics metrictest.Recorder
		m := txretrytest.New(txretrytest.Config{
			Script: []txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "40001"}, {}, {Point: txretrytest.AtEnd, SQLSTATE: "23505"}},
			Retry: txretry.Config{
				TracerProvider: tracerProvider{s: &s}, MeterProvider: &metrics,
				Rand: func() float64 { return 0.5 },
			},
		})
		work := func(ctx context.Context, _ pgx.Tx) error {
			if !trace.SpanFromContext(ctx).IsRecording() {
				return errors.New("fn does not run under the span")
			}
			return nil
		}
		if err := m.DoWith(t.Context(), txretry.Options{Name: "op"}, work); err != nil {
			t.Fatal(err)
		}
		wantSpan := map[string]string{"name": "txretry.Do", "operation": "op", "outcome": "committed", "attempts": "2", "phase.sleep": "0.1"}
		if !maps.Equal(s.span, wantSpan) || s.ended != 1 {
			t.Errorf("span %v, ended %d times, want %v", s.span, s.ended, wantSpan)
		}
		if want := []string{"holdfast.phase=commit,holdfast.sqlstate=40001"}; !slices.Equal(s.events, want) {
			t.Errorf("events %v, want %v", s.events, want)
		}
		wantAttempts := []map[string]string{{"attempt": "1", "phase": "commit", "sqlstate": "40001"}, {"attempt": "2"}}
		for i, attempt := range s.attempts {
			if i >= len(wantAttempts) || !maps.Equal(attempt.span, wantAttempts[i]) || attempt.ended != 1 {
				t.Errorf("attempt %d has the span %v, ended %d times", i+1, attempt.span, attempt.ended)
			}
		}
		if len(s.attempts) != len(wantAttempts) {
			t.Errorf("%d attempts have spans, want %d", len(s.attempts), len(wantAttempts))
		}
		if err := m.DoWith(t.Context(), txretry.Options{Name: "op"}, work); err == nil {
			t.Error("no error")
		}
		wantPoints := map[string][]float64{
			"holdfast.txretry.duration{operation=op,outcome=committed}":           {0.1},
			"holdfast.txretry.duration{operation=op,outcome=rolled_back}":         {0},
			"holdfast.txretry.attempts{operation=op,outcome=committed}":           {2},
			"holdfast.txretry.attempts{operation=op,outcome=rolled_back}":         {1},
			"holdfast.txretry.phase.duration{operation=op,phase=sleep}":           {0.1},
			"holdfast.txretry.failures{operation=op,phase=commit,sqlstate=40001}": {1},
		}
		if points := metrics.Take(); !maps.EqualFunc(points, wantPoints, slices.Equal) {
			t.Errorf("points %v, want %v", points, wantPoints)
		}
	})
}
