package pgcall_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

const conns = 4

// onIdle runs a test in a bubble on a pool of idle connections, which has room for as many again.
func onIdle(t *testing.T, test func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := silent.NewPostgres(t, "")
		pool := s.Pool(t, 2*conns)
		pgtest.Idle(t, pool, conns)
		test(t, s, pool)
	})
}

func one(ctx context.Context, conn *pgxpool.Conn) error {
	_, err := conn.Exec(ctx, "SELECT 1")
	return err
}

// All idle connections are silent: one call that is not answered has all of them closed.
func TestUseGetsOverSilentConnections(t *testing.T) {
	onIdle(t, func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool) {
		s.SilenceConnections()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := pgcall.Use(ctx, pool, one); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("on a silent connection: %v", err)
		}
		time.Sleep(3 * time.Second) // 2 s for an answer, and a second for the farewell
		synctest.Wait()
		if n := s.Kept(); n > 0 || s.Silenced() != conns {
			t.Errorf("%d of %d silent connections are open", n, s.Silenced())
		}
		start := time.Now()
		if err := pgcall.Use(t.Context(), pool, one); err != nil {
			t.Errorf("behind it: %v", err)
		}
		silent.Took(t, "the call", start, 0)
	})
}

// Within costs 2 s, not its whole time, where all connections are silent already.
func TestWithinProvesItsConnection(t *testing.T) {
	onIdle(t, func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool) {
		s.SilenceConnections()
		start := time.Now()
		if err := pgcall.Within(t.Context(), pool, time.Minute, one); err != nil {
			t.Error(err)
		}
		silent.Took(t, "the call", start, 2*time.Second)
	})
}

// A connection that falls silent in the middle ends the call in time, and another one serves Twice.
func TestSilentInTheMiddle(t *testing.T) {
	const d = 12 * time.Second
	onIdle(t, func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool) {
		s.SilenceOn(testenv.Silence{On: "SELECT 1", Deliver: true})
		start := time.Now()
		if err := pgcall.Within(t.Context(), pool, d, one); !errors.Is(err, pgcall.ErrSilent) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the error is %v", err)
		}
		silent.Took(t, "the call", start, d)
		start = time.Now()
		s.SilenceOn(testenv.Silence{On: "SELECT 1"})
		if err := pgcall.Twice(t.Context(), pool, d, one); err != nil {
			t.Error(err)
		}
		silent.Took(t, "the call", start, d)
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		if err := pgcall.Within(cancelled, pool, d, one); !errors.Is(err, context.Canceled) || errors.Is(err, pgcall.ErrSilent) {
			t.Errorf("after the caller has gone: %v", err)
		}
	})
}

// While the server is silent altogether, calls wait for their bound, and the pool works as soon as it is back.
func TestSilentServer(t *testing.T) {
	onIdle(t, func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool) {
		s.Pause()
		start := time.Now()
		var calls sync.WaitGroup
		for range 3 * conns {
			calls.Go(func() {
				if err := pgcall.Within(t.Context(), pool, 3*time.Second, one); !errors.Is(err, pgcall.ErrSilent) {
					t.Errorf("the error is %v", err)
				}
				silent.Took(t, "the call", start, 3*time.Second)
			})
		}
		calls.Wait()
		s.Heal()
		if err := pgcall.Within(t.Context(), pool, 3*time.Second, one); err != nil {
			t.Error(err)
		}
	})
}

// Errors of the caller's function come back as they are.
func TestErrorsOfTheCall(t *testing.T) {
	onIdle(t, func(t *testing.T, _ *silent.Postgres, pool *pgxpool.Pool) {
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
	})
}

// A caller who has waited for a busy pool for long does not lose its place in the queue again and again: it waits for
// 2 s, then for 4 s, then for 8 s.
func TestUseKeepsItsPlace(t *testing.T) {
	onIdle(t, func(t *testing.T, _ *silent.Postgres, pool *pgxpool.Pool) {
		var held []*pgxpool.Conn
		for range 2 * conns {
			conn, err := pool.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, conn)
		}
		served := make(chan string, 2)
		var waiting sync.WaitGroup
		waiting.Go(func() {
			if err := pgcall.Use(t.Context(), pool, func(ctx context.Context, conn *pgxpool.Conn) error {
				served <- "first" // while it keeps the second waiting
				return one(ctx, conn)
			}); err != nil {
				t.Error(err)
			}
		})
		time.Sleep(7 * time.Second) // it waits for the third time
		waiting.Go(func() {
			conn, err := pool.Acquire(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			served <- "second"
			conn.Release()
		})
		time.Sleep(6 * time.Second)
		held[0].Release()
		waiting.Wait()
		if got := <-served; got != "first" {
			t.Errorf("the %s was served before", got)
		}
		for _, conn := range held[1:] {
			conn.Release()
		}
	})
}
