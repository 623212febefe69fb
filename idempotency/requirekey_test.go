package idempotency_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// RequireKey and the middleware refuse the same requests with the same answers.
func TestRequireKey(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		method, path string
		keys         []string
		refused      string
	}{
		{"POST", "/", nil, "IDEMPOTENCY_KEY_REQUIRED"},
		{"POST", "/", []string{goodKey}, ""},
		{"POST", "/", []string{`"` + goodKey + `"`}, ""},
		{"POST", "/", []string{"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"}, "IDEMPOTENCY_KEY_INVALID"},
		{"POST", "/", []string{goodKey, goodKey}, "IDEMPOTENCY_KEY_INVALID"},
		{"GET", "/", nil, ""},
		{"GET", "/", []string{"malformed"}, ""},
		{"POST", "/optional", nil, ""},
		{"POST", "/optional", []string{"malformed"}, "IDEMPOTENCY_KEY_INVALID"},
	} {
		request := func() *http.Request {
			r := httptest.NewRequest(tt.method, tt.path, nil)
			r.Header[idempotency.Header] = tt.keys
			if tt.keys == nil {
				delete(r.Header, idempotency.Header)
			}
			return r
		}
		cfg := idempotency.MiddlewareConfig{Optional: tt.path == "/optional"}
		passed := 0
		charged := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { passed++ })
		before := send(idempotency.RequireKey(cfg)(charged), request())
		if (passed == 0) != (tt.refused != "") {
			t.Errorf("%+v: passed %d times", tt, passed)
		}
		if tt.refused != "" {
			wantCode(t, "before", before, 400, tt.refused)
		}
		within := send(protect(t, idempotencytest.NewStore(), cfg, charged), request())
		if before.Code != within.Code || before.Body.String() != within.Body.String() {
			t.Errorf("%+v: RequireKey answers %d %s, the middleware %d %s", tt, before.Code, before.Body, within.Code, within.Body)
		}
	}
	byDefault := idempotency.RequireKey(idempotency.MiddlewareConfig{})(unreached(t))
	wantCode(t, "by default", send(byDefault, httptest.NewRequest(http.MethodPut, "/", nil)), 400, "IDEMPOTENCY_KEY_REQUIRED")
}
