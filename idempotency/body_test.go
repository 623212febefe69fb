package idempotency_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// A limit set around the middleware is a limit, not a body that broke off.
func TestBodyLimitAround(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, unreached(t))
	outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, 10)
		h.ServeHTTP(w, r)
	})
	wantCode(t, "limited", send(outer, post(goodKey, strings.NewReader(strings.Repeat("x", 11)))), 413, "REQUEST_TOO_LARGE")
}

// Functions of the request may read its body, as FormValue does: it still counts
// in the fingerprint, and the handler still gets it.
func TestFunctionsThatReadTheBody(t *testing.T) {
	t.Parallel()
	read := func(r *http.Request) string {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		return string(body)
	}
	parts := func(r *http.Request) []string { return []string{read(r)[:4]} }
	scope := func(r *http.Request) (string, error) { return "user " + read(r)[:4], nil }
	for name, reads := range map[string]struct {
		scope func(*http.Request) (string, error)
		parts func(*http.Request) []string
	}{"scope": {scope, nil}, "FingerprintParts": {idempotency.GlobalScope, parts}} {
		cfg := idempotency.MiddlewareConfig{FingerprintParts: reads.parts}
		h := protectIn(t, reads.scope, idempotencytest.NewStore(), cfg, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, read(r)) })
		if rec := send(h, post(goodKey, strings.NewReader("ann pays 1"))); rec.Code != 200 || rec.Body.String() != "ann pays 1" {
			t.Errorf("%s: %d, handler read %q", name, rec.Code, rec.Body)
		}
		wantCode(t, name, send(h, post(goodKey, strings.NewReader("ann pays 2"))), 422, "IDEMPOTENCY_KEY_REUSED")
	}
}
