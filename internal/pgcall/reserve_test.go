package pgcall_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

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

// A Reserve works beside a pool of which no connection is free, keeps its connection, and replaces one that is lost.
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

// Where the server has no place for one more connection a Reserve takes one of the pool.
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
