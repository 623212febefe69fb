package idempotencypgx_test

import (
	"context"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Requests that are refused for want of Postgres count so, whether the transaction could not begin or was
// lost, and whoever asked for the key.
func TestOutageIsCounted(t *testing.T) {
	t.Parallel()
	pool, proxy := throughProxy(t)
	quiet := slog.New(slog.DiscardHandler)
	lose := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		proxy.Cut()
		_, err := tx.Exec(ctx, `SELECT`)
		return idempotency.Response{Status: http.StatusCreated}, err
	}
	own := func(s *idempotencypgx.Store) http.Handler { // a handler of the user's
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			resp, err := s.Do(r.Context(), lose)
			if err != nil {
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			resp.Send(w)
		})
	}
	straight := func(s *idempotencypgx.Store) http.Handler {
		return s.Handler(func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
			return lose(ctx, tx)
		})
	}
	for name, tt := range map[string]struct {
		cfg     idempotencypgx.Config
		handler func(*idempotencypgx.Store) http.Handler
		open    bool
	}{
		"Handler":                            {idempotencypgx.Config{}, straight, false},
		"Handler behind a gate":              {idempotencypgx.Config{Gate: idempotencytest.NewStore()}, straight, false},
		"Handler with a lease":               {idempotencypgx.Config{Lease: 30 * time.Second}, straight, false},
		"Do in a handler":                    {idempotencypgx.Config{}, own, false},
		"Do, behind a gate":                  {idempotencypgx.Config{Gate: idempotencytest.NewStore()}, own, false},
		"Do, with a lease":                   {idempotencypgx.Config{Lease: 30 * time.Second}, own, false},
		"Do, with a lease, on an open route": {idempotencypgx.Config{Lease: 30 * time.Second}, own, true},
	} {
		var r metrictest.Recorder
		tt.cfg.Logger = quiet
		store := newAlone(t, pool, tt.cfg)
		protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{
			MeterProvider: &r, Logger: quiet, FailOpen: func(*http.Request) bool { return tt.open },
		})
		must(t, err)
		h := protect(tt.handler(store))
		proxy.Heal()
		testenv.Eventually(t, func() error { return pool.Ping(t.Context()) })
		for range 2 { // the first one loses the server, the other one finds none
			req := httptest.NewRequest(http.MethodPost, "/", nil)
			req.Header.Set(idempotency.Header, string(idempotency.NewKey()))
			rec := httptest.NewRecorder()
			if h.ServeHTTP(rec, req); rec.Code != http.StatusServiceUnavailable {
				t.Errorf("%s: %d %s", name, rec.Code, rec.Body)
			}
		}
		got := map[string]int64{}
		for key, values := range r.Take() {
			if result, ok := strings.CutPrefix(key, "holdfast.idempotency.requests{result="); ok {
				got[strings.TrimSuffix(result, "}")] = int64(values[0])
			}
		}
		if want := (map[string]int64{"store_unavailable": 2}); !maps.Equal(got, want) {
			t.Errorf("%s: counted %v, want %v", name, got, want)
		}
	}
}
