package idempotency_test

import (
	"bytes"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// sink is a ResponseWriter that costs next to nothing.
type sink struct{ header http.Header }

func (s *sink) Header() http.Header         { return s.header }
func (s *sink) WriteHeader(int)             {}
func (s *sink) Write(p []byte) (int, error) { return len(p), nil }

var answer = bytes.Repeat([]byte("x"), 512)

// bench is a POST of 512 bytes that is answered by as many.
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
