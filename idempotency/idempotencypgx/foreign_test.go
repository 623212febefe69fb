package idempotencypgx_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// A record of the gate that may mean "done" is no outage: the records do not decide in its place, and no
// route opens.
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
