package shop

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// fakeShop gives these answers to holds, one after the other and then none, and notes what is asked for.
type fakeShop struct {
	mu      sync.Mutex
	answers []string // status and body
	seats   map[string]int
	keys    map[string]bool
	users   map[string]bool
}

func (f *fakeShop) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/api/reservations" {
		w.WriteHeader(map[string]int{http.MethodGet: http.StatusOK, http.MethodPost: http.StatusCreated}[r.Method])
		fmt.Fprint(w, `{"id":"e","map":[{"seat":"A1"},{"seat":"A2"}]}`)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	var wish struct{ Seats []string }
	_ = json.NewDecoder(r.Body).Decode(&wish)
	f.seats[fmt.Sprint(wish.Seats)]++
	f.keys[r.Header.Get("Idempotency-Key")] = true
	f.users[r.Header.Get("X-Mock-User-Id")] = true
	if len(f.answers) == 0 {
		panic(http.ErrAbortHandler)
	}
	var status int
	var body string
	_, _ = fmt.Sscanf(f.answers[0], "%d %s", &status, &body)
	f.answers = f.answers[1:]
	w.WriteHeader(status)
	fmt.Fprint(w, body)
}

func TestHallCountsAnswers(t *testing.T) {
	t.Parallel()
	shop := &fakeShop{seats: map[string]int{}, keys: map[string]bool{}, users: map[string]bool{}, answers: []string{
		`201 {}`, `409 {"code":"SEATS_UNAVAILABLE"}`, `409 {"code":"RESERVATION_NOT_HELD"}`, `429 {"code":"RATE_LIMITED"}`,
		`503 {"code":"LOCK_TIMEOUT"}`, `500 {"code":"INTERNAL"}`, `404 nothing`,
	}}
	server := httptest.NewServer(shop)
	defer server.Close()
	h, err := OpenHall(t.Context(), server.URL, 1, EnoughSeats(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for i := range 8 {
		if err, ended := h.Hold(t.Context(), i), i < 2; (err == nil) != ended || err != nil && !errors.Is(err, load.ErrGaveUp) {
			t.Errorf("hold %d: %v", i, err)
		}
	}
	server.Close()
	told := h.TakeAnswers()
	want := "1 × 201, 1 × 404, 1 × 409 RESERVATION_NOT_HELD, 1 × 409 SEATS_UNAVAILABLE, 1 × 429 RATE_LIMITED, 1 × 500 INTERNAL, 1 × 503 LOCK_TIMEOUT, 1 × no answer"
	if told.String() != want || told.Errors() != 3 {
		t.Errorf("%s with %d errors, want %s with 3", told, told.Errors(), want)
	}
	if told.Unavailable() != 1 || told.All() != 8 {
		t.Errorf("%d of %d are unavailable, want 1 of 8", told.Unavailable(), told.All())
	}
	if more := h.TakeAnswers(); len(more) != 0 {
		t.Errorf("%s are there twice", more)
	}
	if len(shop.keys) != 8 || len(shop.users) != 8 {
		t.Errorf("%d keys and %d users, want 8 of each", len(shop.keys), len(shop.users))
	}
}

// Each tenth client wants the seat of the one before, and nobody a third one's.
func TestHallSeats(t *testing.T) {
	t.Parallel()
	shop := &fakeShop{
		seats: map[string]int{}, keys: map[string]bool{}, users: map[string]bool{},
		answers: slices.Repeat([]string{"201 {}"}, 200),
	}
	server := httptest.NewServer(shop)
	defer server.Close()
	h, err := OpenHall(t.Context(), server.URL, 1, EnoughSeats(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for i := range h.events { // the seats that are asked for then say of which event
		h.events[i].seats = []string{fmt.Sprint(i, "-A1"), fmt.Sprint(i, "-A2")}
	}
	for err == nil {
		err = h.Hold(t.Context(), 0)
	}
	if errors.Is(err, load.ErrGaveUp) {
		t.Errorf("a hall without seats: %v, want an error that ends the load", err)
	}
	server.Close()
	wanted := map[int]int{}
	for _, n := range shop.seats {
		wanted[n]++
	}
	if want := map[int]int{1: 88, 2: 11}; !maps.Equal(wanted, want) {
		t.Errorf("seats by how many want them: %v, want %v", wanted, want)
	}
}

func TestShopAudit(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	server := testenv.Private(t, testenv.Postgres, "-c", "track_commit_timestamp=on")
	conn, err := pgx.Connect(ctx, server.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	data := &Data{Conn: conn}
	exec := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	audit := func(told, want int) {
		t.Helper()
		if got, err := data.Audit(ctx, told); got != want || err != nil {
			t.Errorf("%d seats sold twice (%v), want %d", got, err, want)
		}
	}
	exec(`CREATE TABLE reservations (id int, event_id int, seats int[], status text, created_at timestamptz DEFAULT now())`)
	exec(`CREATE TABLE reservation_states (reservation_id int)`)
	began, err := data.Now(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := data.Learnt(ctx, began); err == nil {
		t.Error("the read model of nothing has a latency")
	}
	exec(`INSERT INTO reservations VALUES (1, 1, '{1,2}', 'held'), (2, 1, '{3}', 'confirmed'), (3, 2, '{1}', 'held'), (4, 1, '{3}', 'expired')`)
	audit(4, 0)
	if _, err := data.Audit(ctx, 5); err == nil {
		t.Error("five clients were told of four reservations")
	}

	time.Sleep(20 * time.Millisecond)
	exec(`INSERT INTO reservation_states VALUES (1), (2), (3), (4)`)
	if err := data.UntilLearnt(ctx); err != nil {
		t.Error(err)
	}
	learnt, err := data.Learnt(ctx, began)
	if err != nil || learnt[0] < 20 || learnt[1] != learnt[0] {
		t.Errorf("learnt after %v ms (%v), want 20 at least", learnt, err)
	}

	exec(`INSERT INTO reservations VALUES (5, 1, '{3,2}', 'held')`)
	audit(4, 2)
}
