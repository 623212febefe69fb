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
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

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

// An error is answered with its code, any other one with a 500 that the log explains.
func TestHandlerAnswersErrors(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		err    error
		status int
		code   string
		runs   int // of two requests: what is not kept runs again
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

// The problems of the handler link to the document of the middleware.
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

// Nothing runs unprotected because the middleware was forgotten.
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

// What the middleware lets pass is bounded, and rolled back, like what it claims.
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

// An answer that commits with an outer transaction would be given before it is certain.
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

// unreadable records cannot be asked.
type unreadable struct {
	pgxdriver.Records
	err error
}

func (u unreadable) Lookup(context.Context, driver.Key) (pgxdriver.Record, bool, error) {
	return pgxdriver.Record{}, false, u.err
}

// Whether a failure is the echo of an earlier run cannot be known while the records cannot be asked: the
// client may try again, unless that cannot help.
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
