package idempotencypgx_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// With Postgres alone a key whose transaction is open is in use, over HTTP and outside it.
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

// A store prunes by itself, started by what it stores.
func TestStorePrunesByItself(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]idempotencypgx.Config{
		"the records alone": {PruneInterval: time.Millisecond},
		"claims in rows":    {PruneInterval: time.Millisecond, Lease: 30 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			store := newAlone(t, pool, cfg)
			_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_idempotency
				(key, fingerprint, fingerprint_version, status, token, lease_until, expires_at)
				VALUES ('old', '', 0, 'completed', '', NULL, clock_timestamp() - interval '1 s')`)
			must(t, err)
			testenv.Eventually(t, func() error {
				_, _, err := store.DoKey(t.Context(), idempotency.NewKey(), nil, func(context.Context, pgx.Tx) (idempotency.Response, error) {
					return idempotency.Response{Status: http.StatusOK}, nil
				})
				if err != nil {
					return err
				}
				var n int
				err = pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_idempotency WHERE key = 'old'`).Scan(&n)
				if err == nil && n > 0 {
					err = errors.New("it is still there")
				}
				return err
			})
		})
	}
}

// A refusal whose key another run has taken meanwhile is answered with what that one has committed.
func TestRefusalOvertaken(t *testing.T) {
	t.Parallel()
	store := newAlone(t, newPool(t), idempotencypgx.Config{})
	for name, own := range map[string]bool{"a handler of one's own": true, "Handler": false} {
		runs := 0
		var h http.Handler
		post := func(key string) *httptest.ResponseRecorder {
			r := httptest.NewRequest(http.MethodPost, "/", nil)
			r.Header.Set(idempotency.Header, key)
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, r)
			return rec
		}
		key := string(idempotency.NewKey())
		work := func(context.Context, pgx.Tx) (idempotency.Response, error) {
			if runs++; runs == 1 {
				return idempotency.Response{}, soldOut{}
			}
			return idempotency.JSON(http.StatusCreated, "done")
		}
		handler := http.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			first := runs == 0
			resp, err := store.Do(r.Context(), work)
			if first { // the transaction is rolled back
				w.Header().Set("Location", "/nowhere")
				post(key)
			}
			if err != nil {
				http.Error(w, err.Error(), http.StatusConflict)
				return
			}
			resp.Send(w)
		}))
		if !own {
			inner := store.Handler(func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
				return work(ctx, tx)
			})
			handler = claiming{inner, func() {
				if runs == 1 {
					post(key)
				}
			}}
		}
		protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{})
		must(t, err)
		h = protect(handler)
		for range 2 {
			rec := post(key)
			if rec.Code != 201 || rec.Body.String() != `"done"` || rec.Header().Get(idempotency.ReplayedHeader) != "true" || rec.Header().Get("Location") != "" {
				t.Errorf("%s: %d %v %s", name, rec.Code, rec.Header(), rec.Body)
			}
		}
		if runs != 2 {
			t.Errorf("%s: %d runs", name, runs)
		}
	}
}

// claiming is a handler that the middleware takes for that of the store, and that does something after it.
type claiming struct {
	http.Handler
	after func()
}

func (c claiming) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.Handler.ServeHTTP(w, r)
	c.after()
}

func (c claiming) StoreFor(store driver.Store) driver.Store {
	return c.Handler.(driver.Claimer).StoreFor(store)
}
