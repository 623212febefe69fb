package pgcall_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

const conns = 4

// onIdle runs a test in a bubble on a pool of idle connections with room for as many again.
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

// When all idle connections are silent, one call without an answer closes all of them.
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

// With silent connections only, Within takes 2 s, not its whole limit.
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

// A connection that falls silent during a call ends the call in time, and Twice uses another one.
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

// While the server is silent, calls wait for their limit. The pool works again as soon as the server does.
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

// Errors of the caller's function are returned unchanged.
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

// A caller does not lose its place in the queue of a busy pool every 2 s: it waits for 2 s, then for 4 s, then for 8
// s.
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
				served <- "first" // keeps the second caller waiting
				return one(ctx, conn)
			}); err != nil {
				t.Error(err)
			}
		})
		time.Sleep(7 * time.Second) // the third wait
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

// backend returns the server's process behind the connection of a Reserve.
func backend(t *testing.T, r *pgcall.Reserve) (pid uint32) {
	t.Helper()
	err := r.Twice(t.Context(), 5*time.Second, func(ctx context.Context, conn *pgx.Conn) error {
		pid = conn.PgConn().PID()
		return conn.Ping(ctx)
	})
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// A Reserve works while the pool has no free connection, keeps its connection, and replaces a lost one.
func TestReserve_besideAFullPool(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t), 1)
	held, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Release()
	r := pgcall.NewReserve(pool)
	first := backend(t, r)
	if again := backend(t, r); again != first || first == held.Conn().PgConn().PID() {
		t.Errorf("backends %d and %d, that of the pool is %d", first, again, held.Conn().PgConn().PID())
	}
	if _, err := held.Exec(t.Context(), `SELECT pg_terminate_backend($1, 5000)`, first); err != nil {
		t.Fatal(err)
	}
	if err := r.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error { return conn.Ping(ctx) }); err == nil {
		t.Error("a lost connection works")
	}
	if again := backend(t, r); again == first {
		t.Error("a lost connection was kept")
	}
}

// If the server accepts no more connections, a Reserve uses one of the pool.
func TestReserve_withoutAPlace(t *testing.T) {
	t.Parallel()
	cfg, err := pgxpool.ParseConfig(pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 1
	places := 1
	cfg.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		if places--; places < 0 {
			return errors.New("too many connections")
		}
		return nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := pool.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := pgcall.NewReserve(pool)
	if first := backend(t, r); first != backend(t, r) {
		t.Error("it is not the pool's one connection")
	}
}

// A Reserve prepares its connection for each use, as the pool does, and replaces one that is rejected.
func TestReserve_preparesItsConnection(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	accept, fail := true, error(nil)
	prepare := func(ctx context.Context, conn *pgx.Conn) (bool, error) {
		_, err := conn.Exec(ctx, `SET application_name = 'prepared'`)
		ok := accept
		accept = true
		return ok, errors.Join(err, fail)
	}
	for name, set := range map[string]func(*pgxpool.Config){
		"PrepareConn": func(cfg *pgxpool.Config) { cfg.PrepareConn = prepare },
		"BeforeAcquire": func(cfg *pgxpool.Config) {
			cfg.BeforeAcquire = func(ctx context.Context, conn *pgx.Conn) bool {
				ok, err := prepare(ctx, conn)
				return ok && err == nil
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, err := pgxpool.ParseConfig(pgtest.URL(t))
			if err != nil {
				t.Fatal(err)
			}
			set(cfg)
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			r := pgcall.NewReserve(pool)
			use := func() (is string, err error) {
				err = r.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
					if err := conn.QueryRow(ctx, `SHOW application_name`).Scan(&is); err != nil {
						return err
					}
					_, err := conn.Exec(ctx, `SET application_name = 'used'`)
					return err
				})
				return is, err
			}
			for range 2 {
				if is, err := use(); is != "prepared" || err != nil {
					t.Errorf("the connection is %q, %v", is, err)
				}
			}
			first := backend(t, r)
			accept = false
			if again := backend(t, r); again == first {
				t.Error("a connection that was rejected is used")
			}
			fail = broken
			defer func() { fail = nil }()
			if _, err := use(); err == nil || name == "PrepareConn" && !errors.Is(err, broken) {
				t.Errorf("Use returns %v, want the error of the hook", err)
			}
		})
	}
}

// Another session may write the row after a statement that missed it. Only a row that stays unchanged was ignored.
func TestChanges(t *testing.T) {
	t.Parallel()
	failed := errors.New("failed")
	for name, c := range map[string]struct {
		rows    []int64 // of the statement, one run after the other; then 0
		there   []bool  // then true
		fails   error
		ignored bool
		runs    int
	}{
		"changed":           {rows: []int64{1}, runs: 1},
		"nothing to change": {there: []bool{false}, runs: 1},
		"written meanwhile": {rows: []int64{0, 1}, runs: 2},
		"gone meanwhile":    {there: []bool{true, false}, runs: 2},
		"ignored":           {ignored: true, runs: 5},
		"failed":            {fails: failed, runs: 1},
	} {
		runs, looks := 0, 0
		ignored, err := pgcall.Changes(func() (rows int64, err error) {
			if runs < len(c.rows) {
				rows = c.rows[runs]
			}
			runs++
			return rows, c.fails
		}, func() (bool, error) {
			looks++
			return looks > len(c.there) || c.there[looks-1], nil
		})
		if ignored != c.ignored || !errors.Is(err, c.fails) || (err == nil) != (c.fails == nil) || runs != c.runs {
			t.Errorf("%s: ignored %t, error %v, %d runs", name, ignored, err, runs)
		}
	}
}
