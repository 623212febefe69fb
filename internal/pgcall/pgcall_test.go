package pgcall_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

const conns = 4

// open returns a full pool of idle connections through a proxy.
func open(t *testing.T) (*pgxpool.Pool, *testenv.Proxy) {
	t.Helper()
	proxy := testenv.NewProxy(t, pgtest.URL(t))
	pool := pgtest.Pool(t, proxy.URL(), conns)
	pgtest.Idle(t, pool, conns)
	return pool, proxy
}

func one(ctx context.Context, conn *pgxpool.Conn) error {
	_, err := conn.Exec(ctx, "SELECT 1")
	return err
}

// All idle connections are silent: one wait, and no more, gets over them.
func TestUseGetsOverSilentConnections(t *testing.T) {
	t.Parallel()
	pool, proxy := open(t)
	proxy.SilenceConnections()
	call := func(patience time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return pgcall.Use(ctx, pool, one)
	}
	if err := call(time.Second); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("on a silent connection: %v", err)
	}
	testenv.Eventually(t, func() error { // that one call has had all of them closed
		if n := pool.Stat().TotalConns(); n > 0 {
			return fmt.Errorf("%d connections are left", n)
		}
		return nil
	})
	if err := call(time.Minute); err != nil {
		t.Errorf("behind it: %v", err)
	}
	if n := proxy.Silenced(); n != conns {
		t.Errorf("%d connections fell silent, want %d", n, conns)
	}
	pgtest.Idle(t, pool, conns) // none of them is in the pool
	if err := pgcall.Use(t.Context(), pool, one); err != nil {
		t.Error(err)
	}
}

// A call that is rare does not meet the silent ones at all.
func TestWithinProvesItsConnection(t *testing.T) {
	t.Parallel()
	pool, proxy := open(t)
	proxy.SilenceConnections()
	if err := pgcall.Within(t.Context(), pool, time.Minute, one); err != nil {
		t.Error(err)
	}
}

// A connection that falls silent in the middle ends the call in time, and another one serves Twice.
func TestSilentInTheMiddle(t *testing.T) {
	t.Parallel()
	pool, proxy := open(t)
	const d = 12 * time.Second
	proxy.SilenceOn(testenv.Silence{On: "SELECT 1", Deliver: true})
	if err := pgcall.Within(t.Context(), pool, d, one); !errors.Is(err, pgcall.ErrSilent) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the error is %v", err)
	}
	proxy.SilenceOn(testenv.Silence{On: "SELECT 1"})
	if err := pgcall.Twice(t.Context(), pool, d, one); err != nil {
		t.Error(err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := pgcall.Within(cancelled, pool, d, one); !errors.Is(err, context.Canceled) || errors.Is(err, pgcall.ErrSilent) {
		t.Errorf("after the caller has gone: %v", err)
	}
}

// While the server is silent altogether nobody waits for longer than was said, and the pool works as
// soon as it is back.
func TestSilentServer(t *testing.T) {
	t.Parallel()
	pool, proxy := open(t)
	proxy.Pause()
	var calls sync.WaitGroup
	for range 2 * conns {
		calls.Go(func() {
			if err := pgcall.Within(t.Context(), pool, 3*time.Second, one); !errors.Is(err, pgcall.ErrSilent) {
				t.Errorf("the error is %v", err)
			}
		})
	}
	calls.Wait()
	proxy.Heal()
	if err := pgcall.Within(t.Context(), pool, 30*time.Second, one); err != nil {
		t.Error(err)
	}
}

// What the caller's function says comes back as it is.
func TestErrorsOfTheCall(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	wrong := errors.New("wrong")
	for name, call := range map[string]func(context.Context, *pgxpool.Pool, time.Duration, func(context.Context, *pgxpool.Conn) error) error{
		"within": pgcall.Within, "twice": pgcall.Twice,
	} {
		calls := 0
		err := call(t.Context(), pool, time.Minute, func(context.Context, *pgxpool.Conn) error {
			calls++
			return wrong
		})
		if err != wrong || calls != 1 { //nolint:errorlint // not even wrapped
			t.Errorf("%s: %v after %d calls", name, err, calls)
		}
	}
}

// Who has waited for a busy pool for long does not lose its place in the queue again and again.
func TestUseKeepsItsPlace(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t), 1)
	held, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	served := make(chan string, 2)
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if err := pgcall.Use(ctx, pool, func(ctx context.Context, conn *pgxpool.Conn) error {
			served <- "first" // while it keeps the second waiting
			return one(ctx, conn)
		}); err != nil {
			t.Error(err)
		}
	})
	testenv.Eventually(t, func() error {
		if pool.Stat().CanceledAcquireCount() < 2 {
			return errors.New("it has not waited for long")
		}
		return nil
	})
	time.Sleep(500 * time.Millisecond) // it waits again
	waiting.Go(func() {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		served <- "second"
		conn.Release()
	})
	time.Sleep(2100 * time.Millisecond) // of the 8 that it waits now
	held.Release()
	waiting.Wait()
	if got := <-served; got != "first" {
		t.Errorf("the %s was served before", got)
	}
}
