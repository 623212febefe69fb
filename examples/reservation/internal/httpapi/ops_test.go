package httpapi_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
)

func TestOps(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		state := errors.New("down")
		checks := []httpapi.Check{
			{Name: "well", Ready: func(context.Context) error { return nil }},
			{Name: "server", Ready: func(context.Context) error { return state }},
		}
		metrics := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
		s := &shop{t: t, handler: httpapi.Ops(checks, metrics, nil, slog.New(slog.DiscardHandler))}
		s.do(get("/healthz")).wants(http.StatusOK, "")
		s.do(get("/metrics")).wants(http.StatusTeapot, "")
		if a := s.do(get("/readyz")).wants(http.StatusServiceUnavailable, ""); !strings.Contains(a.Body.String(), `"server"`) || strings.Contains(a.Body.String(), "down") {
			t.Errorf("not ready: %s", a.Body)
		}
		state = nil
		time.Sleep(time.Second)
		s.do(get("/readyz")).wants(http.StatusOK, "")
		s.do(get("/api/events")).wants(http.StatusNotFound, "NOT_FOUND")
		s.do(request{method: "POST", path: "/healthz"}).wants(http.StatusMethodNotAllowed, "METHOD_NOT_ALLOWED")

		rec := httptest.NewRecorder()
		s.handler.ServeHTTP(rec, httptest.NewRequest(http.MethodHead, "/healthz", nil))
		if rec.Code != http.StatusOK {
			t.Errorf("HEAD is answered by %d", rec.Code)
		}
	})
}

// TestReadyWhenOneHangs wants the one that hangs to be named, and no other.
func TestReadyWhenOneHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		check := func(name string, takes time.Duration, result error) httpapi.Check {
			return httpapi.Check{Name: name, Ready: func(ctx context.Context) error {
				select {
				case <-time.After(takes):
					return result
				case <-ctx.Done():
					return ctx.Err()
				}
			}}
		}
		checks := []httpapi.Check{
			check("hangs", time.Hour, nil), check("well", time.Second, nil), check("down", 0, errors.New("refused")),
		}
		s := &shop{t: t, handler: httpapi.Ops(checks, http.NotFoundHandler(), nil, slog.New(slog.DiscardHandler))}
		a := s.do(get("/readyz")).wants(http.StatusServiceUnavailable, "")
		if !strings.Contains(a.Body.String(), `["hangs","down"]`) {
			t.Errorf("answer is %s, want hangs and down", a.Body)
		}
	})
}

// TestReadyIsAskedSeldom sends many questions, some of whose senders hang up: each check is asked once a second.
func TestReadyIsAskedSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked int
		var log bytes.Buffer
		check := httpapi.Check{Name: "server", Ready: func(ctx context.Context) error {
			asked++
			time.Sleep(time.Millisecond)
			return errors.Join(errors.New("down"), ctx.Err())
		}}
		handler := httpapi.Ops([]httpapi.Check{check}, http.NotFoundHandler(), nil, slog.New(slog.NewTextHandler(&log, nil)))
		gone, hangUp := context.WithCancel(t.Context())
		hangUp()
		for range 59 {
			var crowd sync.WaitGroup
			for i := range 100 {
				crowd.Go(func() {
					ctx := t.Context()
					if i%2 == 0 {
						ctx = gone
					}
					rec := httptest.NewRecorder()
					handler.ServeHTTP(rec, httptest.NewRequestWithContext(ctx, http.MethodGet, "/readyz", nil))
					if rec.Code != http.StatusServiceUnavailable {
						t.Errorf("answer is %d", rec.Code)
					}
				})
			}
			crowd.Wait()
			time.Sleep(time.Second)
		}
		if asked != 59 {
			t.Errorf("asked %d times in 59 seconds, want 59", asked)
		}
		synctest.Wait()
		text := log.String()
		if lines := strings.Count(text, "\n"); lines != 2 || strings.Count(text, "check=server") != lines ||
			!strings.Contains(text, "repeats=29") || strings.Contains(text, "canceled") {
			t.Errorf("59 looks cost %d lines:\n%s", lines, text)
		}
	})
}
