package idempotencypgx_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
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
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

// A Begin of the same kind as the previous one takes one round trip. Completing adds no index entry.
func TestTripsOfClaims(t *testing.T) {
	t.Parallel()
	direct := newPool(t)
	pool, trips := traced(t, direct)
	store := newStore(t, pool, idempotencypgx.Config{})
	done := newClaim()
	begin := func(claim driver.Claim, want driver.State, most int32) {
		t.Helper()
		before := trips.n.Load()
		if out, err := store.Begin(t.Context(), claim); err != nil || out.State != want {
			t.Errorf("Begin = %+v, %v; want state %v", out, err, want)
		}
		if n := trips.n.Load() - before; n != most {
			t.Errorf("Begin took %d trips, want %d", n, most)
		}
	}
	begin(done, driver.Acquired, 1)
	must(t, store.Complete(t.Context(), done, driver.Response{Status: 201}))
	begin(newClaim(), driver.Acquired, 1)
	begin(done, driver.Completed, 2) // the previous one was a first run
	begin(done, driver.Completed, 1)
	begin(newClaim(), driver.Acquired, 2) // the previous one was a replay
	begin(newClaim(), driver.Acquired, 1)
	pool.Close() // Postgres counts the rows when the session ends
	testenv.Eventually(t, func() error {
		var hot, all int
		err := direct.QueryRow(t.Context(), `SELECT n_tup_hot_upd, n_tup_upd FROM pg_stat_user_tables WHERE relid = 'holdfast_idempotency'::regclass`).Scan(&hot, &all)
		if err == nil && (hot != 1 || all != 1) {
			err = fmt.Errorf("%d of %d updates left the indexes alone, want 1 of 1", hot, all)
		}
		return err
	})
}

// With Postgres alone a key with an open transaction is in use, over HTTP and outside it.
func TestAloneInUse(t *testing.T) {
	t.Parallel()
	store := newAlone(t, newPool(t), idempotencypgx.Config{})
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{})
	must(t, err)
	entered, leave := make(chan struct{}), make(chan struct{})
	h := protect(store.Handler(func(_ context.Context, _ pgx.Tx, r *http.Request) (idempotency.Response, error) {
		if r.Header.Get("X-Slow") != "" {
			close(entered)
			<-leave
		}
		return idempotency.JSON(http.StatusCreated, "done")
	}))
	post := func(key string, slow bool) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set(idempotency.Header, key)
		if slow {
			r.Header.Set("X-Slow", "yes")
		}
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		return rec
	}
	first := make(chan *httptest.ResponseRecorder)
	go func() { first <- post(goodKey, true) }()
	<-entered

	rec := post(goodKey, false)
	if rec.Code != http.StatusConflict || !strings.Contains(rec.Body.String(), "IDEMPOTENCY_KEY_IN_USE") || rec.Header().Get("Retry-After") == "" {
		t.Errorf("while it runs: %d %s %v", rec.Code, rec.Body, rec.Header())
	}
	if rec := post(string(idempotency.NewKey()), false); rec.Code != http.StatusCreated {
		t.Errorf("another key: %d %s", rec.Code, rec.Body)
	}
	_, _, err = store.DoKey(t.Context(), goodKey, nil, func(context.Context, pgx.Tx) (idempotency.Response, error) {
		t.Error("a second run")
		return idempotency.Response{}, nil
	})
	if !errors.Is(err, idempotency.ErrKeyInUse) {
		t.Errorf("DoKey = %v; want ErrKeyInUse", err)
	}
	close(leave)
	if rec := <-first; rec.Code != http.StatusCreated {
		t.Errorf("the first one: %d %s", rec.Code, rec.Body)
	}
	if rec := post(goodKey, false); rec.Code != http.StatusCreated || rec.Header().Get(idempotency.ReplayedHeader) != "true" {
		t.Errorf("afterwards: %d %v", rec.Code, rec.Header())
	}
}

// ignore installs a trigger that makes the table ignore a kind of change.
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

// A transaction commits nothing without its record, because the same key could have its effect again.
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

// If the table ignores a statement about a claim, the error is not ErrLeaseLost.
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

// A late Begin of the same run stores the claim just after a statement that did not find it. The table has ignored nothing.
func TestClaim_storedMeanwhile(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(*idempotencypgx.Store, driver.Claim) error{
		"extend": func(s *idempotencypgx.Store, c driver.Claim) error { return s.Extend(t.Context(), c) },
		"complete": func(s *idempotencypgx.Store, c driver.Claim) error {
			return s.Complete(t.Context(), c, driver.Response{Status: 201})
		},
		"release": func(s *idempotencypgx.Store, c driver.Claim) error { return s.Release(t.Context(), c) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct, c := newPool(t), newClaim()
			pool, late := traced(t, direct)
			var once sync.Once
			late.text, late.before = "SELECT coalesce(lease_until >", func() {
				once.Do(func() {
					_, err := newStore(t, direct, idempotencypgx.Config{}).Begin(t.Context(), c)
					must(t, err)
				})
			}
			if err := call(newStore(t, pool, idempotencypgx.Config{}), c); err != nil {
				t.Error(err)
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

// A read-only database counts as unavailable, and the client gets a Retry-After. Stored answers are replayed.
func TestReadOnlyServer_answers503(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	_, err := pool.Exec(t.Context(), "CREATE TABLE orders (id int)")
	must(t, err)
	cfg := pool.Config().Copy()
	cfg.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on" // as hosts do when a disk is full
	readOnly, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(readOnly.Close)

	post := func(pool *pgxpool.Pool, key string) *httptest.ResponseRecorder {
		store := newStore(t, pool, idempotencypgx.Config{})
		protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{Optional: true})
		must(t, err)
		handler := protect(store.Handler(func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
			_, err := tx.Exec(ctx, "INSERT INTO orders VALUES (1)")
			return idempotency.Response{Status: http.StatusCreated}, err
		}))
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader("{}"))
		if key != "" {
			r.Header.Set(idempotency.Header, key)
		}
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, r)
		return rec
	}
	must(t, newStore(t, pool, idempotencypgx.Config{}).Migrate(t.Context()))
	stored, fresh := string(idempotency.NewKey()), string(idempotency.NewKey())
	for _, tc := range []struct {
		pool *pgxpool.Pool
		key  string
		want int
	}{
		{pool, stored, http.StatusCreated},
		{readOnly, stored, http.StatusCreated},
		{readOnly, fresh, http.StatusServiceUnavailable},
		{readOnly, "", http.StatusServiceUnavailable},
		{pool, fresh, http.StatusCreated},
	} {
		rec := post(tc.pool, tc.key)
		if rec.Code != tc.want || (rec.Header().Get("Retry-After") == "") != (tc.want == http.StatusCreated) {
			t.Errorf("key %q: %d, Retry-After %q, want %d\n%s", tc.key, rec.Code, rec.Header().Get("Retry-After"), tc.want, rec.Body)
		}
	}
}
