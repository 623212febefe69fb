package idempotencypgx_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// A database that refuses writes is unavailable, and the client hears when to come again. Stored answers are replayed.
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
