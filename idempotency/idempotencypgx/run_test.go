package idempotencypgx_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// A first run takes as many round trips as its transaction without a key. The first replay rolls a transaction back,
// each further replay is one SELECT, and the first run after replays takes one SELECT more.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	direct, count := effects(t, newPool(t))
	pool, counter := traced(t, direct)
	manager, store := newManager(t, pool), newAlone(t, pool, idempotencypgx.Config{PruneInterval: -1})
	work := effect("one")
	post := protected(t, store, func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
		return work(ctx, tx)
	})
	taken := func(what string, want int32, do func() error) {
		t.Helper()
		before := counter.n.Load()
		if err := do(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if n := counter.n.Load() - before; n != want {
			t.Errorf("%s: %d round trips, want %d", what, n, want)
		}
	}
	bare := func() error {
		return manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			_, err := work(ctx, tx)
			return err
		})
	}
	byKey := func(key idempotency.Key, replay bool) func() error {
		return func() error {
			_, replayed, err := store.DoKey(t.Context(), key, nil, work)
			if err == nil && replayed != replay {
				err = fmt.Errorf("replayed is %v", replayed)
			}
			return err
		}
	}
	byHTTP := func(key idempotency.Key, replay bool) func() error {
		return func() error {
			rec := post(key, "")
			if rec.Code != http.StatusCreated || (rec.Header().Get(idempotency.ReplayedHeader) == "true") != replay {
				return fmt.Errorf("%d %s %v", rec.Code, rec.Body, rec.Header())
			}
			return nil
		}
	}
	taken("the transaction alone", 3, bare)
	for name, by := range map[string]func(idempotency.Key, bool) func() error{"DoKey": byKey, "Handler": byHTTP} {
		key := idempotency.NewKey()
		taken(name+", first run", 3, by(key, false))
		taken(name+", first replay", 2, by(key, true))
		taken(name+", next replay", 1, by(key, true))
		taken(name+", first run after replays", 4, by(idempotency.NewKey(), false))
		taken(name+", first run again", 3, by(idempotency.NewKey(), false))
	}
	if n := count("one"); n != 7 {
		t.Errorf("%d effects, want 7", n)
	}
}

// The work does not run again, and the transaction's look gives the same answers as the middleware.
func TestHandlerAnswersFromTheLook(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("x", 1<<20)
	for name, tt := range map[string]struct {
		work       func() (idempotency.Response, error)
		other      bool // a different request
		status     int
		code       string
		replayable bool
	}{
		"a replay":          {func() (idempotency.Response, error) { return idempotency.JSON(201, "done") }, false, 201, "done", true},
		"another request":   {func() (idempotency.Response, error) { return idempotency.JSON(201, "done") }, true, 422, "IDEMPOTENCY_KEY_REUSED", false},
		"too large":         {func() (idempotency.Response, error) { return idempotency.JSON(201, large) }, false, 409, "IDEMPOTENCY_RESULT_UNAVAILABLE", false},
		"a refusal":         {func() (idempotency.Response, error) { return idempotency.Response{}, soldOut{} }, false, 409, "SOLD_OUT", true},
		"a refusal, others": {func() (idempotency.Response, error) { return idempotency.Response{}, soldOut{} }, true, 422, "IDEMPOTENCY_KEY_REUSED", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, runs, key := newPool(t), 0, idempotency.NewKey()
			for i := range 3 { // a store that expects no replay
				post := protected(t, newAlone(t, pool, idempotencypgx.Config{}), func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error) {
					runs++
					return tt.work()
				})
				if i == 0 {
					post(key, "")
					continue
				}
				body := ""
				if tt.other {
					body = "other"
				}
				for range 2 { // a store that expects a replay
					rec := post(key, body)
					if rec.Code != tt.status || !strings.Contains(rec.Body.String(), tt.code) || (rec.Header().Get(idempotency.ReplayedHeader) == "true") != tt.replayable {
						t.Errorf("%d %.200s %v", rec.Code, rec.Body, rec.Header())
					}
				}
			}
			if runs != 1 {
				t.Errorf("%d runs", runs)
			}
		})
	}
}

// The look and the lock do not see a record that commits after the transaction's snapshot and before its lock. That
// record is still the answer, and the second effect is rolled back.
func TestRecordBetweenLookAndLock(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.Serializable, pgx.ReadCommitted} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			direct, count := effects(t, newPool(t))
			pool, tracer := traced(t, direct)
			// With XactStatus the look, BEGIN and the lock are separate messages.
			manager, err := txretry.New(pool, txretry.Config{XactStatus: true, Isolation: level})
			must(t, err)
			late, err := idempotencypgx.New(manager, idempotencypgx.Config{})
			must(t, err)
			early, key := newAlone(t, direct, idempotencypgx.Config{}), idempotency.NewKey()
			between := 0
			tracer.text, tracer.before = "pg_try_advisory_xact_lock", func() {
				between++
				if _, replayed, err := early.DoKey(t.Context(), key, nil, effect(string(key))); replayed != (between > 1) || err != nil {
					t.Errorf("in between: replayed %v, error %v", replayed, err)
				}
			}
			runs := 0
			resp, replayed, err := late.DoKey(t.Context(), key, nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				runs++
				if _, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, string(key)); err != nil {
					return idempotency.Response{}, err
				}
				return idempotency.JSON(http.StatusCreated, "late")
			})
			if err != nil || !replayed || !strings.Contains(string(resp.Body), "run 1") || between == 0 || runs != 1 {
				t.Errorf("%s, replayed %v, error %v; %d times in between, %d runs", resp.Body, replayed, err, between, runs)
			}
			if n := count(string(key)); n != 1 {
				t.Errorf("%d effects", n)
			}
		})
	}
}

// Every attempt looks and claims again, and holds the key until its end.
func TestAttemptsClaimAnew(t *testing.T) {
	t.Parallel()
	pool, count := effects(t, newPool(t))
	store := newAlone(t, pool, idempotencypgx.Config{})
	conflict := &pgconn.PgError{Code: "40001"}
	other := func(key idempotency.Key) error {
		_, _, err := store.DoKey(t.Context(), key, nil, effect(string(key)))
		return err
	}

	key, runs := idempotency.NewKey(), 0
	_, replayed, err := store.DoKey(t.Context(), key, nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if err := other(key); !errors.Is(err, idempotency.ErrKeyInUse) {
			t.Errorf("in attempt %d: %v; want that the key is in use", runs+1, err)
		}
		if runs++; runs < 3 {
			return idempotency.Response{}, conflict
		}
		return effect(string(key))(ctx, tx)
	})
	if err != nil || replayed || runs != 3 || count(string(key)) != 1 {
		t.Errorf("replayed %v, error %v, %d runs, %d effects", replayed, err, runs, count(string(key)))
	}

	key, runs = idempotency.NewKey(), 0
	resp, replayed, err := store.DoKey(t.Context(), key, nil, func(ctx context.Context, _ pgx.Tx) (idempotency.Response, error) {
		runs++
		_, err := pool.Exec(ctx, `INSERT INTO holdfast_idempotency (key, fingerprint, fingerprint_version, status, code, token, expires_at)
			VALUES ($1, '', 0, 'completed', 202, 'other', clock_timestamp() + interval '1 h')`, string(key)) // like another run
		return idempotency.Response{}, errors.Join(err, conflict)
	})
	if err != nil || !replayed || resp.Status != http.StatusAccepted || runs != 1 {
		t.Errorf("%d, replayed %v, error %v, %d runs; want the other one's answer", resp.Status, replayed, err, runs)
	}
}

// If a transaction cannot begin, nothing was done, and the error reports that.
func TestNotBegun(t *testing.T) {
	t.Parallel()
	pool, proxy := throughProxy(t)
	proxy.Cut()
	empty := pgtest.New(t)
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	for name, tt := range map[string]struct {
		store       *idempotencypgx.Store
		unavailable bool
		status      int
		text        string
	}{
		"no server":               {newAlone(t, pool, idempotencypgx.Config{Logger: logger}), true, 503, "unavailable"},
		"no server behind a gate": {newAlone(t, pool, idempotencypgx.Config{Gate: idempotencytest.NewStore(), Logger: logger}), true, 503, "unavailable"},
		"no table":                {newAlone(t, empty, idempotencypgx.Config{Logger: logger}), false, 500, "Migrate"},
	} {
		never := func(context.Context, pgx.Tx) (idempotency.Response, error) {
			t.Errorf("%s: it ran", name)
			return idempotency.Response{Status: http.StatusOK}, nil
		}
		_, _, err := tt.store.DoKey(t.Context(), idempotency.NewKey(), nil, never)
		_, outage := errors.AsType[*txretry.UnavailableError](err)
		if err == nil || !strings.Contains(err.Error(), tt.text) || outage != tt.unavailable || errors.Is(err, idempotency.ErrStoreUnavailable) != tt.unavailable {
			t.Errorf("%s: %v", name, err)
		}
		rec := protected(t, tt.store, func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
			return never(ctx, tx)
		})(idempotency.NewKey(), "")
		if rec.Code != tt.status || strings.Contains(rec.Body.String(), "IDEMPOTENCY_STORE_UNAVAILABLE") != tt.unavailable {
			t.Errorf("%s: %d %s", name, rec.Code, rec.Body)
		}
		if !strings.Contains(log.String(), tt.text) {
			t.Errorf("%s: log %q", name, log.String())
		}
		log.Reset()
	}
}

// After a connection lost in the middle of a transaction the record cannot be read. Nothing was done, and the log has
// the reason.
func TestLostBeforeCommit(t *testing.T) {
	t.Parallel()
	pool, proxy := throughProxy(t)
	var log bytes.Buffer
	store := newAlone(t, pool, idempotencypgx.Config{PruneInterval: -1, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	rec := protected(t, store, func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
		proxy.Cut()
		_, err := tx.Exec(ctx, `SELECT`)
		return idempotency.Response{}, err
	})(idempotency.NewKey(), "")
	if rec.Code != http.StatusServiceUnavailable || !strings.Contains(rec.Body.String(), "IDEMPOTENCY_STORE_UNAVAILABLE") {
		t.Errorf("%d %s", rec.Code, rec.Body)
	}
	if !strings.Contains(log.String(), "look up record") {
		t.Errorf("log %s", log.String())
	}
}

// A caller's statement that travels with BEGIN may fail on the effect of an earlier run. The answer of that run is
// still returned.
func TestEchoAtBegin(t *testing.T) {
	t.Parallel()
	pool, count := effects(t, newPool(t))
	if _, err := pool.Exec(t.Context(), `CREATE UNIQUE INDEX ON effects (name)`); err != nil {
		t.Fatal(err)
	}
	key := idempotency.NewKey()
	opts := txretry.Options{AtBegin: txdriver.Statement{SQL: `INSERT INTO effects VALUES ($1)`, Args: []any{string(key)}}}
	for i := range 2 {
		// The second gate has no record of the key.
		store := newAlone(t, pool, idempotencypgx.Config{Gate: idempotencytest.NewStore()})
		resp, replayed, err := idempotency.Do(t.Context(), store, key, nil, func(ctx context.Context) (idempotency.Response, error) {
			return store.DoWith(ctx, opts, func(context.Context, pgx.Tx) (idempotency.Response, error) {
				return idempotency.JSON(http.StatusCreated, "done")
			})
		})
		if err != nil || replayed != (i == 1) || !strings.Contains(string(resp.Body), "done") {
			t.Errorf("call %d: %s, replayed %v, error %v", i+1, resp.Body, replayed, err)
		}
	}
	if n := count(string(key)); n != 1 {
		t.Errorf("%d effects", n)
	}
}

// Of many concurrent requests, over HTTP and outside it, one takes effect. The others get its answer or the error
// that the key is in use.
func TestRivalsAlone(t *testing.T) {
	t.Parallel()
	for name, newPool := range map[string]func(*testing.T) *pgxpool.Pool{"direct": newPool, "PgBouncer": pooled} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, count := effects(t, newPool(t))
			stores := []*idempotencypgx.Store{newAlone(t, pool, idempotencypgx.Config{}), newAlone(t, pool, idempotencypgx.Config{})}
			for range 25 {
				key := idempotency.NewKey()
				work := effect(string(key))
				var all sync.WaitGroup
				var firsts atomic.Int32
				for i := range 8 {
					store := stores[i%2]
					post := protected(t, store, func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
						return work(ctx, tx)
					})
					all.Go(func() {
						rec := post(key, "")
						switch {
						case rec.Code == http.StatusConflict && strings.Contains(rec.Body.String(), "IDEMPOTENCY_KEY_IN_USE"):
						case rec.Code != http.StatusCreated:
							t.Errorf("%d %s", rec.Code, rec.Body)
						case rec.Header().Get(idempotency.ReplayedHeader) == "":
							firsts.Add(1)
						}
					})
				}
				all.Wait()
				rec := protected(t, stores[0], nil)(key, "")
				if n := count(string(key)); n != 1 || firsts.Load() != 1 || rec.Code != http.StatusCreated || rec.Header().Get(idempotency.ReplayedHeader) != "true" {
					t.Errorf("%d effects, %d first answers; afterwards %d %s", n, firsts.Load(), rec.Code, rec.Body)
				}
			}
		})
	}
}

// The middleware uses its own store if the handler belongs to another store, or if a gate or lease comes before the
// records.
// The metrics of a handler's transactions name its route, with and without a key.
func TestHandler_namesItsTransaction(t *testing.T) {
	t.Parallel()
	var metrics metrictest.Recorder
	manager, err := txretry.New(newPool(t), txretry.Config{MeterProvider: &metrics})
	must(t, err)
	store, err := idempotencypgx.New(manager, idempotencypgx.Config{})
	must(t, err)
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{
		Optional: true,
	})
	must(t, err)
	mux := http.NewServeMux()
	mux.Handle("POST /orders/{id}", protect(store.Handler(func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error) {
		return idempotency.JSON(201, "done")
	})))
	for _, key := range []string{"", string(idempotency.NewKey())} {
		r := httptest.NewRequest(http.MethodPost, "/orders/5", nil)
		if key != "" {
			r.Header.Set(idempotency.Header, key)
		}
		rec := httptest.NewRecorder()
		if mux.ServeHTTP(rec, r); rec.Code != 201 {
			t.Fatalf("%d %s", rec.Code, rec.Body)
		}
		var found []string
		for name := range metrics.Take() {
			if strings.Contains(name, "operation=POST /orders/{id}") {
				found = append(found, name)
			} else if strings.Contains(name, "operation=") {
				t.Errorf("key %q: %s", key, name)
			}
		}
		if len(found) == 0 {
			t.Errorf("key %q: no metric names the route", key)
		}
	}
}

func TestHandlerLeavesOtherStores(t *testing.T) {
	t.Parallel()
	store := newAlone(t, newPool(t), idempotencypgx.Config{})
	h, ok := store.Handler(nil).(driver.Claimer)
	if !ok {
		t.Fatal("no driver.Claimer")
	}
	other := newAlone(t, newPool(t), idempotencypgx.Config{})
	if got := h.StoreFor(other); got != driver.Store(other) {
		t.Errorf("%T in place of another store", got)
	}
	leased := newStore(t, newPool(t), idempotencypgx.Config{})
	if got := leased.Handler(nil).(driver.Claimer).StoreFor(leased); got != driver.Store(leased) { //nolint:errcheck // it is one
		t.Errorf("%T in place of a store with leases", got)
	}
}

// A foreign record in the gate may mean "done", so it does not count as an outage: neither the records nor FailOpen
// replaces the gate.
func TestForeignRecordOfTheGate(t *testing.T) {
	t.Parallel()
	pool, client := newPool(t), redistest.New(t)
	gate, err := idempotencyredis.New(client, idempotencyredis.Config{})
	must(t, err)
	store := newAlone(t, pool, idempotencypgx.Config{Gate: gate})
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{
		FailOpen: func(*http.Request) bool { return true }, Logger: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	runs := 0
	place := func(context.Context, pgx.Tx) (idempotency.Response, error) {
		runs++
		return idempotency.JSON(http.StatusCreated, "placed")
	}
	h := protect(store.Handler(func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
		return place(ctx, tx)
	}))
	for name, write := range map[string]func(record string) error{
		"status": func(record string) error { return client.HSet(t.Context(), record, "status", "archived").Err() },
		"type":   func(record string) error { return client.Set(t.Context(), record, "done", time.Hour).Err() },
	} {
		key := idempotency.NewKey()
		must(t, write("idempotency:"+string(key)))
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set(idempotency.Header, string(key))
		rec := httptest.NewRecorder()
		if h.ServeHTTP(rec, r); rec.Code != http.StatusServiceUnavailable || rec.Header().Get("Idempotency-Bypassed") != "" {
			t.Errorf("%s: %d %v %s", name, rec.Code, rec.Header(), rec.Body)
		}
		if _, _, err := store.DoKey(t.Context(), key, nil, place); !errors.Is(err, idempotency.ErrStoreUnavailable) {
			t.Errorf("%s: DoKey: %v", name, err)
		}
	}
	if runs > 0 {
		t.Errorf("%d runs", runs)
	}
}

// If another run takes the key during a rejection, the committed answer of that run is the answer.
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
			if first { // this transaction is rolled back
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

// claiming is a handler that the middleware treats like the store's handler, and that does something after it.
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

type handled struct {
	http.Handler
	log *bytes.Buffer
}

func handle(t *testing.T, faults []txretrytest.Fault, work func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error)) handled {
	t.Helper()
	h := handled{log: &bytes.Buffer{}}
	logger := slog.New(slog.NewTextHandler(h.log, nil))
	store, err := idempotencytest.New(txretrytest.New(txretrytest.Config{Script: faults}), idempotencypgx.Config{Logger: logger})
	must(t, err)
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{Optional: true, Logger: logger})
	must(t, err)
	h.Handler = protect(store.Handler(work))
	return h
}

func (h handled) post(key, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
	if key != "" {
		r.Header.Set(idempotency.Header, key)
	}
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, r)
	return rec
}

// Each attempt reads the body from its start.
func TestHandlerRewindsTheBody(t *testing.T) {
	t.Parallel()
	conflict := txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}
	for _, key := range []string{goodKey, ""} {
		runs := 0
		h := handle(t, []txretrytest.Fault{conflict, conflict}, func(_ context.Context, _ pgx.Tx, r *http.Request) (idempotency.Response, error) {
			runs++
			body, err := io.ReadAll(r.Body)
			return idempotency.Response{Status: http.StatusCreated, Body: body}, err
		})
		if rec := h.post(key, "whole"); rec.Code != 201 || rec.Body.String() != "whole" || runs != 3 {
			t.Errorf("key %q: %d %s after %d runs", key, rec.Code, rec.Body, runs)
		}
	}
}

// An error with a code is answered with it; any other error gets 500 and a log line.
func TestHandlerAnswersErrors(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		err    error
		status int
		code   string
		runs   int // of two requests: an answer that is not kept runs again
		logged bool
	}{
		"final":         {soldOut{}, 409, "SOLD_OUT", 1, false},
		"wrapped":       {fmt.Errorf("seats: %w", soldOut{}), 409, "SOLD_OUT", 1, false},
		"not final":     {idempotencypgx.ErrNotCommitted, 503, "NOT_COMMITTED", 2, false},
		"without codes": {errors.New("secret"), 500, "INTERNAL", 2, true},
	} {
		runs := 0
		h := handle(t, nil, func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error) {
			runs++
			return idempotency.Response{}, tt.err
		})
		for range 2 {
			rec := h.post(goodKey, "")
			if rec.Code != tt.status || !strings.Contains(rec.Body.String(), `"code":"`+tt.code+`"`) || strings.Contains(rec.Body.String(), "secret") {
				t.Errorf("%s: %d %s; want %d %s", name, rec.Code, rec.Body, tt.status, tt.code)
			}
		}
		if runs != tt.runs || strings.Contains(h.log.String(), "secret") != tt.logged {
			t.Errorf("%s: %d runs, want %d; log %q", name, runs, tt.runs, h.log)
		}
	}
}

// The problems of the handler link to the middleware's Documentation.
func TestHandlerLinksToDocumentation(t *testing.T) {
	t.Parallel()
	store, err := idempotencytest.New(txretrytest.New(txretrytest.Config{}), idempotencypgx.Config{})
	must(t, err)
	for document, want := range map[string]string{
		"":                         "https://github.com/holdfast-go/holdfast/blob/main/examples/guides/problems.md#not_committed",
		"https://example.com/docs": "https://example.com/docs#not_committed",
	} {
		cfg := idempotency.MiddlewareConfig{Optional: true, Documentation: document}
		protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, cfg)
		must(t, err)
		h := handled{Handler: protect(store.Handler(func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error) {
			return idempotency.Response{}, idempotencypgx.ErrNotCommitted
		}))}
		for _, key := range []string{goodKey, ""} {
			if rec := h.post(key, ""); !strings.Contains(rec.Body.String(), `"type":"`+want+`"`) {
				t.Errorf("key %q: %s; want type %s", key, rec.Body, want)
			}
		}
	}
}

// Without the middleware nothing runs unprotected.
func TestHandlerWithoutMiddleware(t *testing.T) {
	t.Parallel()
	store, err := idempotencytest.New(txretrytest.New(txretrytest.Config{}), idempotencypgx.Config{Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	h := handled{Handler: store.Handler(func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error) {
		t.Error("it ran")
		return idempotency.Response{Status: 200}, nil
	})}
	for _, key := range []string{goodKey, ""} {
		if rec := h.post(key, ""); rec.Code != http.StatusInternalServerError {
			t.Errorf("key %q: %d %s", key, rec.Code, rec.Body)
		}
	}
}

// A request without a claim has the same limits as one with a claim, and is rolled back alike.
func TestHandlerWithoutClaim(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		method, key string
		bytes       int
		answer      int
		want        int
		committed   bool
	}{
		"without a key":       {"POST", "", 10, 201, 201, true},
		"a method without":    {"DELETE", goodKey, 10, 200, 200, true},
		"a large body":        {"POST", "", 1<<20 + 1, 201, 413, false},
		"a body at the limit": {"POST", "", 1 << 20, 201, 201, true},
		"not final":           {"POST", "", 10, 503, 503, false},
		"no status":           {"POST", "", 10, 0, 500, false},
	} {
		committed := false
		h := handle(t, nil, func(_ context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
			txretry.AfterCommit(tx, func() { committed = true })
			return idempotency.Response{Status: tt.answer}, nil
		})
		r := httptest.NewRequest(tt.method, "/", strings.NewReader(strings.Repeat("x", tt.bytes)))
		if tt.key != "" {
			r.Header.Set(idempotency.Header, tt.key)
		}
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		if rec.Code != tt.want || committed != tt.committed {
			t.Errorf("%s: %d %s, committed %v; want %d", name, rec.Code, rec.Body, committed, tt.want)
		}
	}
}

// An answer within an outer transaction would be sent before it is certain.
func TestDoRefusesSavepoints(t *testing.T) {
	t.Parallel()
	manager := txretrytest.New(txretrytest.Config{})
	store, err := idempotencytest.New(manager, idempotencypgx.Config{Gate: idempotencytest.NewStore()})
	must(t, err)
	lost := errors.New("the outer transaction fails")
	call := func(runs *int) error {
		_, _, err := idempotency.Do(t.Context(), store, goodKey, nil, func(ctx context.Context) (int, error) {
			return 1, manager.Do(ctx, func(ctx context.Context, _ pgx.Tx) error {
				_, err := store.DoWith(ctx, txretry.Options{Savepoint: true}, func(context.Context, pgx.Tx) (idempotency.Response, error) {
					*runs++
					return idempotency.Response{Status: 200}, nil
				})
				return errors.Join(lost, err)
			})
		})
		return err
	}
	for range 2 {
		runs := 0
		if err := call(&runs); !errors.Is(err, lost) || runs > 0 {
			t.Errorf("%d runs, error %v", runs, err)
		}
	}
}

// unreadable records return an error.
type unreadable struct {
	pgxdriver.Records
	err error
}

func (u unreadable) Lookup(context.Context, driver.Key) (pgxdriver.Record, bool, error) {
	return pgxdriver.Record{}, false, u.err
}

// While the records are unreadable, it is unknown whether an earlier run caused a failure. The client may retry,
// unless that cannot help.
func TestHandlerCannotAskForTheRecord(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]int{"": 503, "57P01": 503, "53300": 503, "57014": 503, "42P01": 500, "42501": 500, "3F000": 500} {
		err := errors.New("lost")
		if code != "" {
			err = &pgconn.PgError{Code: code}
		}
		var log bytes.Buffer
		store, failed := idempotencypgx.New(txretrytest.New(txretrytest.Config{}), idempotencypgx.Config{
			Gate: idempotencytest.NewStore(), Records: unreadable{err: err}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if failed != nil {
			t.Fatal(failed)
		}
		rec := protected(t, store, func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error) {
			return idempotency.Response{}, soldOut{}
		})(goodKey, "")
		if rec.Code != want || strings.Contains(rec.Body.String(), "SOLD_OUT") || !strings.Contains(log.String(), "after a failed transaction") {
			t.Errorf("%q: %d %s, log %s", code, rec.Code, rec.Body, log.String())
		}
	}
}

// If another run of the key stores its answer first, that is the answer of both: idempotency.Do on a store without leases.
func TestDo_answersWithTheFasterRun(t *testing.T) {
	t.Parallel()
	store := newAlone(t, newPool(t), idempotencypgx.Config{})
	key := idempotency.NewKey()
	run := func(request, value string, meanwhile func()) (string, bool, error) {
		return idempotency.Do(t.Context(), store, key, []string{request}, func(context.Context) (string, error) {
			meanwhile()
			return value, nil
		})
	}
	fast := func() {
		if got, replayed, err := run("pay", "fast", func() {}); got != "fast" || replayed || err != nil {
			t.Errorf("the faster run: %q, %v, %v", got, replayed, err)
		}
	}
	if got, replayed, err := run("pay", "slow", fast); got != "fast" || !replayed || err != nil {
		t.Errorf("the slower run: %q, %v, %v", got, replayed, err)
	}
	key = idempotency.NewKey()
	if _, replayed, err := run("cancel", "slow", fast); replayed || !errors.Is(err, idempotency.ErrKeyReused) {
		t.Errorf("the slower run of another request: %v, %v", replayed, err)
	}
}
