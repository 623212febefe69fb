package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func protect(t *testing.T, store driver.Store, cfg idempotency.MiddlewareConfig, fn http.HandlerFunc) http.Handler {
	t.Helper()
	return protectIn(t, idempotency.UnsafeGlobalScope, store, cfg, fn)
}

func protectIn(t *testing.T, scope func(*http.Request) (string, error), store driver.Store, cfg idempotency.MiddlewareConfig, fn http.HandlerFunc) http.Handler {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	middleware, err := idempotency.NewMiddleware(store, scope, cfg)
	must(t, err)
	return middleware(fn)
}

func send(h http.Handler, r *http.Request) *httptest.ResponseRecorder {
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, r)
	return rec
}

func post(key string, body io.Reader) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/", body)
	r.Header.Set(idempotency.Header, key)
	return r
}

func wantCode(t *testing.T, what string, rec *httptest.ResponseRecorder, status int, code string) {
	t.Helper()
	if rec.Code != status || !strings.Contains(rec.Body.String(), `"code":"`+code+`"`) {
		t.Errorf("%s: %d %s; want %d %s", what, rec.Code, rec.Body, status, code)
	}
}

func unreached(t *testing.T) http.HandlerFunc {
	t.Helper()
	return func(_ http.ResponseWriter, r *http.Request) { t.Errorf("handler ran: %s %v", r.Method, r.Header) }
}

const goodKey = "a0eebc999c0b4ef8bb6d6bb9bd380a11"

var fp = []string{"charge", "42"}

// faulty is a store whose methods can be made to fail.
type faulty struct {
	driver.Store
	begin, extend, complete, release func() error
}

func (f *faulty) fail(fn func() error) error {
	if fn == nil {
		return nil
	}
	return fn()
}

func (f *faulty) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	if err := f.fail(f.begin); err != nil {
		return driver.BeginResult{}, err
	}
	return f.Store.Begin(ctx, c)
}

func (f *faulty) Extend(ctx context.Context, c driver.Claim) error {
	if err := f.fail(f.extend); err != nil {
		return err
	}
	return f.Store.Extend(ctx, c)
}

func (f *faulty) Complete(ctx context.Context, c driver.Claim, r driver.Response) error {
	if err := f.fail(f.complete); err != nil {
		return err
	}
	return f.Store.Complete(ctx, c, r)
}

func (f *faulty) Release(ctx context.Context, c driver.Claim) error {
	if err := f.fail(f.release); err != nil {
		return err
	}
	return f.Store.Release(ctx, c)
}

var errDown = errors.New("store is down")

func down() error { return errDown }

// counted returns the number of requests per result. It fails on any other attribute.
func counted(r *metrictest.Recorder) map[string]int64 {
	by := map[string]int64{}
	for key, values := range r.Take() {
		if result, ok := strings.CutPrefix(key, "holdfast.idempotency.requests{result="); ok {
			by[strings.TrimSuffix(result, "}")] = int64(values[0])
		}
	}
	return by
}

type heard struct {
	http.Header
	status int
	body   string
}

func exchange(t *testing.T, client *http.Client, method, url string) heard {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	must(t, err)
	r.Header.Set(idempotency.Header, goodKey)
	res, err := client.Do(r)
	must(t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	must(t, err)
	return heard{res.Header, res.StatusCode, string(body)}
}

// overWire returns the answer of h as a client receives it, as one text.
func overWire(t *testing.T, h http.Handler) string {
	t.Helper()
	server := httptest.NewServer(h)
	defer server.Close()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, nil)
	must(t, err)
	r.Header.Set(idempotency.Header, goodKey)
	res, err := server.Client().Do(r)
	must(t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	must(t, err)
	res.Header.Del("Date")
	text := res.Status + "\n"
	for _, h := range []http.Header{res.Header, res.Trailer} {
		for _, name := range slices.Sorted(maps.Keys(h)) {
			text += name + ": " + strings.Join(h[name], ", ") + "\n"
		}
		text += "\n"
	}
	return text + string(body)
}

// sink is a ResponseWriter that does almost nothing.
type sink struct{ header http.Header }

func (s *sink) Header() http.Header         { return s.header }
func (s *sink) WriteHeader(int)             {}
func (s *sink) Write(p []byte) (int, error) { return len(p), nil }

var answer = bytes.Repeat([]byte("x"), 512)

// bench is a POST of 512 bytes whose answer has the same size.
type bench struct {
	handler http.Handler
	request *http.Request
	payload *bytes.Reader
	writer  *sink
}

func newBench(t testing.TB, protected bool) *bench {
	t.Helper()
	contentType := []string{"application/json"}
	b := &bench{payload: bytes.NewReader(answer), writer: &sink{header: http.Header{}}}
	b.handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Content-Type"] = contentType
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write(answer)
	})
	if protected {
		protect, err := idempotency.NewMiddleware(idempotencytest.NewStore(), idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{
			Logger: slog.New(slog.DiscardHandler),
		})
		must(t, err)
		b.handler = protect(b.handler)
	}
	b.request = httptest.NewRequest(http.MethodPost, "/things", nil)
	b.request.Header.Set("Content-Type", "application/json")
	b.request.ContentLength = int64(len(answer))
	return b
}

func (b *bench) send(key []string) {
	b.payload.Reset(answer)
	b.request.Body = io.NopCloser(b.payload)
	b.request.Header[idempotency.Header] = key
	clear(b.writer.header)
	b.handler.ServeHTTP(b.writer, b.request)
}

func keys(n int) [][]string {
	all := make([][]string, n)
	for i := range all {
		all[i] = []string{string(idempotency.NewKey())}
	}
	return all
}
