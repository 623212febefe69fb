package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// observed is a short-delay configuration that collects the retries.
func observed() (txretry.Config, *recorder) {
	r := &recorder{}
	return txretry.Config{BaseDelay: time.Millisecond, MaxDelay: 5 * time.Millisecond, Logger: slog.New(r)}, r
}

// recorder is a log that keeps the attempts which are repeated.
type recorder struct {
	mu      sync.Mutex
	retries []map[string]string
}

func (r *recorder) Enabled(context.Context, slog.Level) bool { return true }
func (r *recorder) WithAttrs([]slog.Attr) slog.Handler       { return r }
func (r *recorder) WithGroup(string) slog.Handler            { return r }

func (r *recorder) Handle(_ context.Context, record slog.Record) error {
	if record.Message != "txretry: retrying transaction" {
		return nil
	}
	retry := map[string]string{}
	record.Attrs(func(a slog.Attr) bool {
		retry[a.Key] = a.Value.String()
		return true
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.retries = append(r.retries, retry)
	return nil
}

// want checks that there was exactly one retry.
func (r *recorder) want(t *testing.T, sqlstate, phase string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.retries) != 1 {
		t.Fatalf("%d retries, want 1: %v", len(r.retries), r.retries)
	}
	if a := r.retries[0]; a["sqlstate"] != sqlstate || a["phase"] != phase || a["attempt"] != "1" {
		t.Errorf("retried: %v, want %s in %s", a, sqlstate, phase)
	}
}

func wantCounter(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	got, err := read(context.WithoutCancel(t.Context()), pool)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("counter is %d, want %d", got, want)
	}
}

// eventuallyCounter waits for a COMMIT that is still at work when its caller has left.
func eventuallyCounter(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	testenv.Eventually(t, func() error {
		got, err := read(t.Context(), pool)
		if err == nil && got != want {
			err = fmt.Errorf("counter is %d, want %d", got, want)
		}
		return err
	})
}

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
				// The other one holds the second row and waits for the first, which this one has just given up. The
				// first can be taken again before the other one has woken up: they would deadlock once more.
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
