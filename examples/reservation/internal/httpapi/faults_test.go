package httpapi_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

var createEvent = `{"name":"Concert","seats":5}`

// events counts the events there are.
func (s *shop) events() int {
	s.t.Helper()
	var list struct{ Events []event }
	s.do(get("/api/events")).wants(http.StatusOK, "").into(&list)
	return len(list.Events)
}

func TestLockTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFaultyShop(t, 0, slices.Repeat([]txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "40001"}}, 6)...)
		r := post("/api/events", createEvent)
		if a := s.do(r).wants(http.StatusServiceUnavailable, "LOCK_TIMEOUT"); a.Header().Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
		if n := s.events(); n != 0 {
			t.Errorf("%d events after a LOCK_TIMEOUT", n)
		}
		s.do(r).wants(http.StatusCreated, "") // the key is free again
	})
}

func TestOtherFaultsOfTheStore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFaultyShop(t, 0,
			txretrytest.Fault{Point: txretrytest.AtEnd, SQLSTATE: "53300"},
			txretrytest.Fault{Point: txretrytest.AtEnd, SQLSTATE: "40P01"})
		r := post("/api/events", createEvent)
		a := s.do(r).wants(http.StatusServiceUnavailable, "DATABASE_UNAVAILABLE")
		if a.Header().Get("Retry-After") == "" || strings.Contains(a.Body.String(), "53300") {
			t.Errorf("answer is %v %s", a.Header(), a.Body)
		}
		s.do(r).wants(http.StatusCreated, "")
		if n := s.events(); n != 1 {
			t.Errorf("%d events, want 1", n)
		}
	})
}

func TestReplyOfCommitLost(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]txretrytest.Point{
		"applied": txretrytest.ReplyLostApplied, "not applied": txretrytest.ReplyLostNotApplied,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := newFaultyShop(t, 0, txretrytest.Fault{Point: fault})
				r := post("/api/events", createEvent)
				first := s.do(r)
				if applied := fault == txretrytest.ReplyLostApplied; applied {
					first.wants(http.StatusCreated, "")
				} else {
					first.wants(http.StatusServiceUnavailable, "NOT_COMMITTED")
				}
				again := s.do(r).wants(http.StatusCreated, "")
				if first.Code == http.StatusCreated && again.Body.String() != first.Body.String() {
					t.Errorf("first %s, then %s", first.Body, again.Body)
				}
				if n := s.events(); n != 1 {
					t.Errorf("%d events, want 1", n)
				}
			})
		})
	}
}

// TestGateForgets loses what Redis would hold: the record of the transaction decides.
func TestGateForgets(t *testing.T) {
	t.Parallel()
	s := newShop(t, 0)
	e := s.event(`{"name":"Concert","seats":1}`)
	hold := post("/api/reservations", holdBody(e.ID, `"quantity":1`))
	late := post("/api/reservations", holdBody(e.ID, `"quantity":1`))
	first := s.do(hold).wants(http.StatusCreated, "")
	s.do(late).wants(http.StatusConflict, "SEATS_UNAVAILABLE")

	s.forgetKeys()
	again := s.do(hold).wants(http.StatusCreated, "")
	if again.Body.String() != first.Body.String() || again.Header().Get(idempotency.ReplayedHeader) != "true" {
		t.Errorf("first %s, then %s with %v", first.Body, again.Body, again.Header())
	}
	s.do(late).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
	s.do(hold.as("bob")).wants(http.StatusUnprocessableEntity, "IDEMPOTENCY_KEY_REUSED")
}

// broken panics once.
type broken struct {
	*memory.Shop
	calls int
}

func (b *broken) Once(ctx context.Context, eventID string,
	fn func(context.Context, booking.Work) (idempotency.Response, error),
) (idempotency.Response, error) {
	if b.calls++; b.calls == 1 {
		panic("broken")
	}
	return b.Shop.Once(ctx, eventID, fn)
}

func TestPanic(t *testing.T) {
	t.Parallel()
	s := newShop(t, 0)
	s.handler = newHandler(t, s.parts, &broken{Shop: s.parts.Shop}, 10)
	r := post("/api/events", createEvent)
	s.do(r).wants(http.StatusInternalServerError, "INTERNAL")
	s.do(r).wants(http.StatusCreated, "")
}

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

// logged is a handler on another back end, whose log is kept.
func (s *shop) logged(backend httpapi.Backend, log *bytes.Buffer) http.Handler {
	s.t.Helper()
	handler, err := httpapi.New(httpapi.Config{
		Backend: backend, Keys: s.parts.Keys, Limiter: s.parts.Limiter, UserLimit: 10, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	noError(s.t, err)
	return handler
}

func TestClientHasGone(t *testing.T) {
	t.Parallel()
	s := newShop(t, 0)
	var log bytes.Buffer
	handler := s.logged(hanging{s.parts.Shop}, &log)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handler.ServeHTTP(w, r.WithContext(ctx)) })
	s.do(get("/api/events"))
	if log.Len() > 0 {
		t.Errorf("a client that hangs up is logged: %s", &log)
	}
}

// refusing is a database that is down.
type refusing struct{ *memory.Shop }

func (refusing) Events(context.Context, string, int) ([]booking.Event, error) {
	return nil, errors.New("connection refused")
}

// TestOutageCostsFewLines sends 6000 requests to a database that is down.
func TestOutageCostsFewLines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, 0)
		var log bytes.Buffer
		s.handler = s.logged(refusing{s.parts.Shop}, &log)
		for range 6000 {
			s.do(get("/api/events")).wants(http.StatusServiceUnavailable, "UNAVAILABLE")
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		text := log.String()
		if lines := strings.Count(text, "\n"); lines != 3 || strings.Count(text, "connection refused") != lines ||
			!strings.Contains(text, "repeats=2999") || !strings.Contains(text, "repeats=3000") {
			t.Errorf("an outage of a minute costs %d lines:\n%.2000s", lines, text)
		}
		s.do(get("/api/events"))
		if lines := strings.Count(log.String(), "\n"); lines != 4 {
			t.Errorf("the next outage is not logged at once:\n%s", log.String())
		}
		time.Sleep(time.Minute) // its timer ends
	})
}

func TestOps(t *testing.T) {
	t.Parallel()
	answers := func(status int) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) })
	}
	s := &shop{t: t, handler: httpapi.Ops(answers(http.StatusServiceUnavailable), answers(http.StatusTeapot), nil)}
	s.do(get("/healthz")).wants(http.StatusOK, "")
	s.do(get("/metrics")).wants(http.StatusTeapot, "")
	s.do(get("/readyz")).wants(http.StatusServiceUnavailable, "")
	s.do(get("/api/events")).wants(http.StatusNotFound, "NOT_FOUND")
	s.do(request{method: "POST", path: "/healthz"}).wants(http.StatusMethodNotAllowed, "METHOD_NOT_ALLOWED")

	rec := httptest.NewRecorder()
	s.handler.ServeHTTP(rec, httptest.NewRequest(http.MethodHead, "/healthz", nil))
	if rec.Code != http.StatusOK {
		t.Errorf("HEAD is answered by %d", rec.Code)
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
