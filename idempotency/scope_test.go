package idempotency_test

import (
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// Callers never share answers by a setting that was left out.
func TestGlobalScope(t *testing.T) {
	t.Parallel()
	caller := func(r *http.Request) []string { return []string{r.Header.Get("X-User")} }
	wrapped := func(r *http.Request) (string, error) { return idempotency.GlobalScope(r) }
	for name, tt := range map[string]struct {
		scope           func(*http.Request) (string, error)
		parts           func(*http.Request) []string
		refused         bool
		alice, stranger int
	}{
		"without the caller":          {scope: idempotency.GlobalScope, refused: true},
		"with the caller":             {scope: idempotency.GlobalScope, parts: caller, alice: 200, stranger: 422},
		"behind a function":           {scope: wrapped, alice: 500, stranger: 500},
		"behind a function, callers":  {scope: wrapped, parts: caller, alice: 200, stranger: 422},
		"unsafe":                      {scope: idempotency.UnsafeGlobalScope, alice: 200, stranger: 200},
		"unsafe, and with the caller": {scope: idempotency.UnsafeGlobalScope, parts: caller, alice: 200, stranger: 422},
	} {
		protect, err := idempotency.NewMiddleware(idempotencytest.NewStore(), tt.scope, idempotency.MiddlewareConfig{
			FingerprintParts: tt.parts, Logger: slog.New(slog.DiscardHandler),
		})
		if refused := err != nil && strings.Contains(err.Error(), "UnsafeGlobalScope"); refused != tt.refused {
			t.Errorf("%s: NewMiddleware says %v", name, err)
		}
		if err != nil {
			continue
		}
		h := protect(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		for _, call := range []struct {
			user string
			want int
		}{{"alice", tt.alice}, {"mallory", tt.stranger}} {
			r := post(goodKey, nil)
			r.Header.Set("X-User", call.user)
			if rec := send(h, r); rec.Code != call.want {
				t.Errorf("%s: %s got %d %s, want %d", name, call.user, rec.Code, rec.Body, call.want)
			}
		}
	}
}
