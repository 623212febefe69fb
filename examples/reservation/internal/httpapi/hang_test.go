package httpapi_test

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/idempotency"
)

// hanging is a database that accepts everything and never answers.
type hanging struct{ *memory.Shop }

func (hanging) Events(ctx context.Context, _ string, _ int) ([]booking.Event, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (hanging) Once(ctx context.Context, _ string,
	_ func(context.Context, booking.Work) (idempotency.Response, error),
) (idempotency.Response, error) {
	<-ctx.Done()
	return idempotency.Response{}, ctx.Err()
}

func TestServerHangs(t *testing.T) {
	t.Parallel()
	for name, r := range map[string]request{"GET": get("/api/events"), "POST": post("/api/events", createEvent)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := newShop(t, 0)
				s.handler = newHandler(t, s.parts, hanging{s.parts.Shop}, 10)
				begun := time.Now()
				answered := make(chan answer)
				go func() { answered <- s.do(r) }()
				select {
				case a := <-answered:
					a.wants(http.StatusServiceUnavailable, "UNAVAILABLE")
					if took := time.Since(begun); a.Header().Get("Retry-After") == "" || took < 55*time.Second {
						t.Errorf("after %v, with %v", took, a.Header())
					}
				case <-time.After(time.Hour):
					t.Fatal("not answered within an hour")
				}
			})
		})
	}
}

func TestClientHasGone(t *testing.T) {
	t.Parallel()
	s := newShop(t, 0)
	var log bytes.Buffer
	handler, err := httpapi.New(httpapi.Config{
		Backend: hanging{s.parts.Shop}, Keys: s.parts.Keys, Limiter: s.parts.Limiter, UserLimit: 10,
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handler.ServeHTTP(w, r.WithContext(ctx)) })
	s.do(get("/api/events"))
	if log.Len() > 0 {
		t.Errorf("a client that hangs up is logged: %s", &log)
	}
}
