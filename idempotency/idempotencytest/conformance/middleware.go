package conformance

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// TestMiddleware tests the HTTP middleware on a store.
func TestMiddleware(t *testing.T, b Backend) {
	b.run(t, "a repetition gets the first answer", testReplay)
	b.run(t, "a request in flight", testInFlight)
	b.run(t, "a key of another request", testReused)
	b.run(t, "a key of another caller, on routes that sum bodies differently", testReusedAcrossRoutes)
	b.run(t, "a panic frees the key", testPanic)
	b.run(t, "a result that cannot be kept", testUnkeepable)
	b.run(t, "a settled claim", testSettled)
	b.run(t, "32 requests with one key, 100 times", testStampede)
}

func testReplay(t *testing.T, store driver.Store) {
	var runs, refunds int
	s := newService(t, store, idempotency.MiddlewareConfig{
		OnReplay: func(*http.Request) { refunds++ },
	}, func(w http.ResponseWriter, r *http.Request) {
		runs++
		body, err := io.ReadAll(r.Body)
		if err != nil || string(body) != `{}` {
			t.Errorf("handler read %q, %v", body, err)
		}
		w.Header().Set("Location", "/things/1")
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Set-Cookie", "session=secret")
		w.Header().Set("X-Request-Id", "1")
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, `{"run":%d}`, runs)
	})
	key := idempotency.NewKey()
	first := s.post(key)
	if first.is(t, 201, ""); first.replayed() || first.header.Get("Set-Cookie") == "" || first.header.Get("X-Request-Id") == "" {
		t.Errorf("first answer has headers %v", first.header)
	}
	quoted := request{body: `{}`}.with("")
	quoted.Header.Set(idempotency.Header, `"`+string(key)+`"`)
	for _, again := range []reply{s.post(key), s.do(quoted)} {
		if again.is(t, 201, ""); again.body != first.body || !again.replayed() {
			t.Errorf("repetition %+v; want %+v and marked", again, first)
		}
		if again.header.Get("Location") != "/things/1" || again.header.Get("Content-Type") != "application/json" {
			t.Errorf("repetition lost headers: %v", again.header)
		}
		if again.header.Get("Set-Cookie") != "" || again.header.Get("X-Request-Id") != "" {
			t.Errorf("repetition has headers of the first: %v", again.header)
		}
	}
	if runs != 1 || refunds != 2 {
		t.Errorf("%d runs, %d refunds; want 1 and 2", runs, refunds)
	}
}

func testInFlight(t *testing.T, store driver.Store) {
	entered, leave := make(chan struct{}), make(chan struct{})
	s := newService(t, store, idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		close(entered)
		<-leave
		w.WriteHeader(http.StatusNoContent)
	})
	key := idempotency.NewKey()
	done := make(chan reply)
	go func() { done <- s.post(key) }()
	<-entered
	busy := s.post(key)
	busy.is(t, 409, "IDEMPOTENCY_KEY_IN_USE")
	if after := busy.header.Get("Retry-After"); after == "" || after == "0" {
		t.Errorf("Retry-After is %q", after)
	}
	close(leave)
	first := <-done
	first.is(t, 204, "")
	s.post(key).is(t, 204, "")
}

func testReused(t *testing.T, store driver.Store) {
	s := newService(t, store, idempotency.MiddlewareConfig{
		FingerprintParts: func(r *http.Request) []string { return []string{r.Header.Get("X-User")} },
	}, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	key := idempotency.NewKey()
	s.do(request{target: "/things?a=1&b=2", body: `{"n":1}`}.with(key)).is(t, 200, "")
	s.do(request{target: "/things?b=2&a=1", body: `{"n":1}`}.with(key)).is(t, 200, "")
	for _, q := range []request{
		{target: "/things?a=1&b=2", body: `{"n":2}`},
		{target: "/things?a=1&b=3", body: `{"n":1}`},
		{target: "/others?a=1&b=2", body: `{"n":1}`},
		{target: "/things?a=1&b=2", body: `{"n":1}`, method: http.MethodPut},
		{target: "/things?a=1&b=2", body: `{"n":1}`, header: http.Header{"Content-Type": {"text/plain"}}},
		{target: "/things?a=1&b=2", body: `{"n":1}`, header: http.Header{"X-User": {"mallory"}}},
	} {
		s.do(q.with(key)).is(t, 422, "IDEMPOTENCY_KEY_REUSED")
	}
}

// testReusedAcrossRoutes: caller and target are always compared, even if the body sums are not comparable.
func testReusedAcrossRoutes(t *testing.T, store driver.Store) {
	routes := [2]*service{}
	for i, canonical := range []bool{false, true} {
		routes[i] = newService(t, store, idempotency.MiddlewareConfig{
			CanonicalJSON:    canonical,
			FingerprintParts: func(r *http.Request) []string { return []string{r.Header.Get("X-User")} },
		}, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "of "+r.Header.Get("X-User")) })
	}
	alice, mallory := http.Header{"X-User": {"alice"}}, http.Header{"X-User": {"mallory"}}
	for i, first := range routes {
		other, key := routes[1-i], idempotency.NewKey()
		first.do(request{body: `{"n":1}`, header: alice}.with(key)).is(t, 200, "")
		other.do(request{body: `{"n":1}`, header: mallory}.with(key)).is(t, 422, "IDEMPOTENCY_KEY_REUSED")
		other.do(request{body: `{"n":1}`, header: alice, target: "/others"}.with(key)).is(t, 422, "IDEMPOTENCY_KEY_REUSED")
		if again := other.do(request{body: `{"n":1}`, header: alice}.with(key)); again.body != "of alice" || !again.replayed() {
			t.Errorf("a change of CanonicalJSON rejects a key in use: %+v", again)
		}
	}
}

func testPanic(t *testing.T, store driver.Store) {
	runs := 0
	s := newService(t, store, idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) {
		if runs++; runs == 1 {
			panic("boom")
		}
	})
	key := idempotency.NewKey()
	func() {
		defer func() {
			if got := recover(); got != "boom" {
				t.Errorf("recovered %v, want the handler's panic", got)
			}
		}()
		s.post(key)
	}()
	s.post(key).is(t, 200, "")
}

func testUnkeepable(t *testing.T, store driver.Store) {
	for name, fn := range map[string]http.HandlerFunc{
		"too large": func(w http.ResponseWriter, _ *http.Request) {
			for range 10 {
				_, _ = io.WriteString(w, strings.Repeat("x", 20))
			}
		},
		"flushed": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "part")
			if err := http.NewResponseController(w).Flush(); err != nil {
				t.Errorf("Flush: %v", err)
			}
			_, _ = io.WriteString(w, strings.Repeat("y", 196))
		},
	} {
		runs := 0
		s := newService(t, store, idempotency.MiddlewareConfig{MaxResponseBytes: 100},
			func(w http.ResponseWriter, r *http.Request) { runs++; fn(w, r) })
		key := idempotency.NewKey()
		first := s.post(key)
		if first.is(t, 200, ""); len(first.body) != 200 {
			t.Errorf("%s: client got %d of 200 bytes", name, len(first.body))
		}
		s.post(key).is(t, 409, "IDEMPOTENCY_RESULT_UNAVAILABLE")
		if runs != 1 {
			t.Errorf("%s: %d runs", name, runs)
		}
	}
}

func testSettled(t *testing.T, store driver.Store) {
	answer, err := idempotency.JSON(http.StatusCreated, "kept")
	must(t, "JSON", err)
	kept := driver.Response(answer)
	refunds := 0
	var record driver.BeginResult
	var replayed bool
	s := newService(t, store, idempotency.MiddlewareConfig{OnReplay: func(*http.Request) { refunds++ }},
		func(w http.ResponseWriter, r *http.Request) {
			claim, _ := driver.ClaimFrom(r.Context())
			if record.Fingerprint == (driver.Fingerprint{}) {
				record.Fingerprint = claim.Fingerprint
			}
			claim.Settle(record, replayed)
			w.WriteHeader(http.StatusServiceUnavailable) // the record is sent instead of this
		})

	record = driver.BeginResult{State: driver.Completed, Response: kept}
	key := idempotency.NewKey()
	if first := s.post(key); first.status != 201 || first.body != `"kept"` || first.replayed() {
		t.Errorf("fresh: %+v", first)
	}
	if again := s.post(key); again.status != 201 || again.body != `"kept"` || !again.replayed() || refunds != 1 {
		t.Errorf("repeated: %+v, %d refunds", again, refunds)
	}

	replayed = true
	record = driver.BeginResult{State: driver.Completed, Response: kept}
	if first := s.post(idempotency.NewKey()); first.status != 201 || !first.replayed() || refunds != 2 {
		t.Errorf("record of an earlier run: %+v, %d refunds", first, refunds)
	}

	record = driver.BeginResult{State: driver.Completed, Response: kept, Fingerprint: driver.FingerprintOf("other")}
	key = idempotency.NewKey()
	s.post(key).is(t, 422, "IDEMPOTENCY_KEY_REUSED")
	s.post(key).is(t, 422, "IDEMPOTENCY_KEY_REUSED")
}

func testStampede(t *testing.T, store driver.Store) {
	const keys, clients = 100, 32
	var runs sync.Map // of key to *atomic.Int32
	s := newService(t, store, idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, r *http.Request) {
		n, _ := runs.LoadOrStore(r.Header.Get(idempotency.Header), new(atomic.Int32))
		n.(*atomic.Int32).Add(1)
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "answer to %s", r.Header.Get(idempotency.Header))
	})
	for range keys {
		key := idempotency.NewKey()
		var wg sync.WaitGroup
		var fresh atomic.Int32
		for range clients {
			wg.Go(func() {
				r := s.post(key)
				switch {
				case r.status == 201 && r.body == "answer to "+string(key):
					if !r.replayed() {
						fresh.Add(1)
					}
				case r.status != 409:
					t.Errorf("answer %d %s", r.status, r.body)
				}
			})
		}
		wg.Wait()
		n, ok := runs.Load(string(key))
		if !ok || n.(*atomic.Int32).Load() != 1 || fresh.Load() != 1 {
			t.Fatalf("want one run and one fresh answer, got %d fresh", fresh.Load())
		}
	}
}

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

// request holds the parts of a POST that the tests vary.
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

// reply is an answer as a client receives it.
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
