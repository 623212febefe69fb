package httpapi_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
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

// newShop gives every test a shop of its own; limit is that of each user, 0 for plenty.
func newShop(t testing.TB, limit int) *shop {
	t.Helper()
	return newFaultyShop(t, limit)
}

// newFaultyShop is newShop with faults of its first transactions.
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

// post is a POST that is right in every way.
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

// answer is what came back.
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

// wants fails unless the answer has the status, and the code if it is a problem.
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

// hold holds what the rest of the body says, such as `"quantity":1`.
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
