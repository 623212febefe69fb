package idempotency_test

import (
	"bytes"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// An outage costs a line every ten seconds for each kind of fault, not one for
// every request.
func TestLogOfAnOutage(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		store driver.Store
		cfg   idempotency.MiddlewareConfig
		want  []string
	}{
		"begin": {&faulty{begin: down}, idempotency.MiddlewareConfig{}, []string{"store is unavailable"}},
		"fallback": {
			twoTiers{&faulty{begin: down}, &faulty{begin: down}},
			idempotency.MiddlewareConfig{},
			[]string{"store is unavailable", "fallback is unavailable"},
		},
		"complete": {&faulty{Store: idempotencytest.NewStore(), complete: down}, idempotency.MiddlewareConfig{}, []string{"result could not be stored"}},
		"scope": {
			idempotencytest.NewStore(),
			idempotency.MiddlewareConfig{},
			[]string{"scope failed"},
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			var out bytes.Buffer
			cfg := tt.cfg
			cfg.Logger = slog.New(slog.NewTextHandler(&out, nil))
			scope := idempotency.UnsafeGlobalScope
			if name == "scope" {
				scope = func(*http.Request) (string, error) { return "", errors.New("no user") }
			}
			protect, err := idempotency.NewMiddleware(tt.store, scope, cfg)
			must(t, err)
			h := protect(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			start := time.Now()
			requests := 0
			for ; time.Since(start) <= 10*time.Second; time.Sleep(100 * time.Millisecond) {
				send(h, post(string(idempotency.NewKey()), nil))
				requests++
			}
			for _, want := range tt.want {
				if n := strings.Count(out.String(), `msg="idempotency: `+want); n < 1 || n > 2 {
					t.Errorf("%s: %d lines of %q for %d requests:\n%s", name, n, want, requests, out.String())
				}
			}
			if n := strings.Count(out.String(), "\n"); n > 2*len(tt.want) || !strings.Contains(out.String(), "skipped=") {
				t.Errorf("%s: %d lines:\n%s", name, n, out.String())
			}
		})
	}
}
