package conformance

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// service is a handler behind the middleware.
type service struct {
	t       *testing.T
	handler http.Handler
}

func newService(t *testing.T, store driver.Store, cfg idempotency.MiddlewareConfig, fn http.HandlerFunc) *service {
	t.Helper()
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &service{t: t, handler: protect(fn)}
}

// request is what the tests vary of a POST.
type request struct {
	method string
	target string
	body   string
	header http.Header
}

func (q request) with(key idempotency.Key) *http.Request {
	if q.method == "" {
		q.method = http.MethodPost
	}
	if q.target == "" {
		q.target = "/things"
	}
	r := httptest.NewRequestWithContext(context.Background(), q.method, q.target, strings.NewReader(q.body))
	r.Header.Set("Content-Type", "application/json")
	for name, values := range q.header {
		r.Header[name] = values
	}
	if key != "" {
		r.Header.Set(idempotency.Header, string(key))
	}
	return r
}

// reply is an answer as a client sees it.
type reply struct {
	status int
	header http.Header
	body   string
}

func (s *service) do(r *http.Request) reply {
	s.t.Helper()
	rec := httptest.NewRecorder()
	s.handler.ServeHTTP(rec, r)
	res := rec.Result()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Errorf("read answer: %v", err)
	}
	return reply{status: res.StatusCode, header: res.Header, body: string(body)}
}

func (s *service) post(key idempotency.Key) reply {
	s.t.Helper()
	return s.do(request{body: `{}`}.with(key))
}

func (r reply) replayed() bool { return r.header.Get(idempotency.ReplayedHeader) == "true" }

// is checks the status and, for a problem, its code.
func (r reply) is(t *testing.T, status int, code string) {
	t.Helper()
	if r.status != status || code != "" && !strings.Contains(r.body, `"code":"`+code+`"`) {
		t.Errorf("answer %d %s; want %d %s", r.status, r.body, status, code)
	}
	if code != "" && r.header.Get("Content-Type") != "application/problem+json" {
		t.Errorf("content type %q", r.header.Get("Content-Type"))
	}
}
