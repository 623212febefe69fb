package httpapi_test

import (
	"bytes"
	"context"
	"encoding/json"
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

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

const jsonType = "application/json"

// shop is the API on a back end.
type shop struct {
	t       testing.TB
	handler http.Handler
	parts   *memory.Parts // nil on Postgres
	pool    *pgxpool.Pool // nil in memory
	// messages counts the messages in the outbox.
	messages func() int
}

// newShop returns a new shop. limit is the limit of each user, 0 for plenty.
func newShop(t testing.TB, limit int) *shop {
	t.Helper()
	return newFaultyShop(t, limit)
}

// newFaultyShop is newShop with faults in its first transactions.
func newFaultyShop(t testing.TB, limit int, faults ...txretrytest.Fault) *shop {
	t.Helper()
	parts, err := memory.Open(memory.Config{Faults: faults, Logger: slog.New(slog.DiscardHandler)})
	noError(t, err)
	if limit == 0 {
		limit = 1_000_000
	}
	return &shop{
		t: t, handler: newHandler(t, parts, parts.Shop, limit), parts: parts,
		messages: func() int { return len(parts.Outbox.Pending()) },
	}
}

func newHandler(t testing.TB, parts *memory.Parts, backend httpapi.Backend, limit int) http.Handler {
	t.Helper()
	handler, err := httpapi.New(httpapi.Config{
		Shop: booking.Shop{
			Hold:  time.Minute,
			NewID: func() string { return uuid.Must(uuid.NewV7()).String() },
		},
		Backend: backend, Keys: parts.Keys, Limiter: parts.Limiter, UserLimit: limit,
		Logger: slog.New(slog.DiscardHandler),
	})
	noError(t, err)
	return handler
}

// request is one request; the zero value of a field leaves that part out.
type request struct {
	method, path, user, key, contentType, body string
	header                                     http.Header
}

// post returns a valid POST.
func post(path, body string) request {
	r := request{method: http.MethodPost, path: path, user: "ada", key: string(idempotency.NewKey()), body: body}
	if body != "" {
		r.contentType = jsonType
	}
	return r
}

func get(path string) request { return request{method: http.MethodGet, path: path} }

func (r request) as(user string) request     { r.user = user; return r }
func (r request) withKey(key string) request { r.key = key; return r }

// answer is the response to a request.
type answer struct {
	*httptest.ResponseRecorder
	t testing.TB
}

func (s *shop) do(r request) answer {
	s.t.Helper()
	req := httptest.NewRequest(r.method, r.path, bytes.NewBufferString(r.body))
	if r.body == "" {
		req.Body = http.NoBody
	}
	for name, value := range map[string]string{
		httpapi.UserHeader: r.user, idempotency.Header: r.key, "Content-Type": r.contentType,
	} {
		if value != "" {
			req.Header.Set(name, value)
		}
	}
	for name, values := range r.header {
		req.Header[name] = values
	}
	rec := httptest.NewRecorder()
	s.handler.ServeHTTP(rec, req)
	return answer{rec, s.t}
}

// wants fails the test unless the answer has the status, and the code if it is a problem.
func (a answer) wants(status int, code string) answer {
	a.t.Helper()
	got := ""
	if a.Header().Get("Content-Type") == "application/problem+json" {
		var p struct {
			Code, Title string
			Status      int
		}
		a.into(&p)
		got = p.Code
		if p.Status != a.Code || p.Title == "" {
			a.t.Errorf("problem has status %d and title %q, the answer %d", p.Status, p.Title, a.Code)
		}
	}
	if a.Code != status || got != code {
		a.t.Fatalf("answer is %d %q, want %d %q: %s", a.Code, got, status, code, a.Body)
	}
	return a
}

func (a answer) into(v any) {
	a.t.Helper()
	if err := json.Unmarshal(a.Body.Bytes(), v); err != nil {
		a.t.Fatalf("%v in %s", err, a.Body)
	}
}

type event struct {
	ID    string
	Name  string
	Seats int
	Map   []struct{ Seat, State string }
}

type reservation struct {
	ID        string
	EventID   string `json:"event_id"`
	Seats     []string
	Status    string
	ExpiresAt time.Time `json:"expires_at"`
}

// event creates an event.
func (s *shop) event(body string) event {
	s.t.Helper()
	var e event
	s.do(post("/api/events", body)).wants(http.StatusCreated, "").into(&e)
	return e
}

// hold holds seats. rest is the rest of the body, such as `"quantity":1`.
func (s *shop) hold(eventID, rest string) reservation {
	s.t.Helper()
	var r reservation
	s.do(post("/api/reservations", holdBody(eventID, rest))).wants(http.StatusCreated, "").into(&r)
	return r
}

func holdBody(eventID, rest string) string { return `{"event_id":"` + eventID + `",` + rest + `}` }

// taken counts the seats that are not free.
func (s *shop) taken(eventID string) int {
	s.t.Helper()
	var e event
	s.do(get("/api/events/"+eventID)).wants(http.StatusOK, "").into(&e)
	n := 0
	for _, seat := range e.Map {
		if seat.State != "free" {
			n++
		}
	}
	return n
}

// forgetKeys empties the gate.
func (s *shop) forgetKeys() { s.parts.Keys.Store = idempotencytest.NewStore() }

func noError(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

var createEvent = `{"name":"Concert","seats":5}`

// events counts the events.
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

// TestGateForgets loses the data that Redis would have: the record of the transaction decides.
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

// logged returns a handler on another back end, which logs to log.
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
