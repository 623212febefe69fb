package idempotencypgx_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// ignore makes the table ignore a kind of change.
func ignore(t *testing.T, pool *pgxpool.Pool, change string) {
	t.Helper()
	for _, sql := range []string{
		`CREATE OR REPLACE FUNCTION ignored() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$`,
		`CREATE TRIGGER ignoring BEFORE ` + change + ` ON holdfast_idempotency FOR EACH ROW EXECUTE FUNCTION ignored()`,
	} {
		_, err := pool.Exec(t.Context(), sql)
		must(t, err)
	}
}

// A transaction commits nothing without its record: the same key would have its effect again.
func TestIgnoredRecord_commitsNothing(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `CREATE TABLE effects (n int)`)
	must(t, err)
	ignore(t, pool, "INSERT")
	store := newAlone(t, pool, idempotencypgx.Config{})
	key := idempotency.Key(idempotency.NewKey())
	for range 2 {
		_, _, err = store.DoKey(t.Context(), key, nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			_, err := tx.Exec(ctx, `INSERT INTO effects VALUES (1)`)
			return idempotency.Response{Status: 201}, err
		})
		if !errors.Is(err, idempotencypgx.ErrIgnored) {
			t.Errorf("DoKey = %v", err)
		}
	}
	var effects int
	must(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM effects`).Scan(&effects))
	if effects != 0 {
		t.Errorf("%d effects of a key without record", effects)
	}
	if err := store.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "trigger ignoring of table holdfast_idempotency") {
		t.Errorf("Check = %v", err)
	}
	c := newClaim()
	if err := store.Complete(t.Context(), c, driver.Response{Status: 409}); !errors.Is(err, idempotencypgx.ErrIgnored) {
		t.Errorf("Complete = %v", err)
	}
}

// Every statement about a claim returns an error where the table ignores it, which is not that of a lost lease.
func TestIgnoredClaim(t *testing.T) {
	t.Parallel()
	for change, calls := range map[string][]string{
		"INSERT": {"begin"}, "UPDATE": {"extend", "complete"}, "DELETE": {"release"},
	} {
		t.Run(change, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			store := newStore(t, pool, idempotencypgx.Config{})
			for _, name := range calls {
				c := newClaim()
				call := map[string]func() error{
					"begin":    func() error { _, err := store.Begin(t.Context(), c); return err },
					"extend":   func() error { return store.Extend(t.Context(), c) },
					"complete": func() error { return store.Complete(t.Context(), c, driver.Response{Status: 201}) },
					"release":  func() error { return store.Release(t.Context(), c) },
				}
				if name != "begin" {
					must(t, call["begin"]())
				}
				ignore(t, pool, change)
				if err := call[name](); !errors.Is(err, idempotencypgx.ErrIgnored) || errors.Is(err, driver.ErrLeaseLost) {
					t.Errorf("%s = %v", name, err)
				}
				_, err := pool.Exec(t.Context(), `DROP TRIGGER ignoring ON holdfast_idempotency`)
				must(t, err)
			}
		})
	}
}

// Slow requests that hold every connection of the pool keep their leases.
func TestLease_renewedBesideAFullPool(t *testing.T) {
	t.Parallel()
	const slow = 2
	direct := newPool(t)
	cfg := direct.Config()
	cfg.MaxConns = slow
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	defer pool.Close()
	store := newStore(t, pool, idempotencypgx.Config{Lease: time.Second})
	var wg sync.WaitGroup
	for range slow {
		wg.Go(func() {
			key := idempotency.Key(idempotency.NewKey())
			resp, _, err := store.DoKey(t.Context(), key, nil, func(ctx context.Context, _ pgx.Tx) (idempotency.Response, error) {
				testenv.Eventually(t, func() error {
					var renewed bool
					err := direct.QueryRow(t.Context(), `SELECT lease_until > created_at + interval '1.5 s' FROM holdfast_idempotency WHERE key = $1`,
						"claim:"+string(key)).Scan(&renewed)
					if err == nil && !renewed && ctx.Err() == nil {
						err = errors.New("the lease is not renewed")
					}
					return err
				})
				return idempotency.Response{Status: 201}, ctx.Err()
			})
			if err != nil || resp.Status != 201 {
				t.Errorf("DoKey = %+v, %v", resp, err)
			}
		})
	}
	wg.Wait()
	must(t, store.Check(t.Context()))
}
