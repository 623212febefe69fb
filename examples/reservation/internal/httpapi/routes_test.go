package httpapi_test

import (
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
)

func TestHoldConfirmCancel(t *testing.T) { onBoth(t, testHoldConfirmCancel) }

func testHoldConfirmCancel(t *testing.T, s *shop) {
	e := s.event(`{"name":"Concert","seats":12}`)
	if e.Name != "Concert" || e.Seats != 12 || e.ID == "" {
		t.Fatalf("event is %+v", e)
	}

	before := time.Now()
	r := s.hold(e.ID, `"seats":["B2","A10"]`)
	if !slices.Equal(r.Seats, []string{"A10", "B2"}) || r.Status != "held" || r.EventID != e.ID {
		t.Errorf("reservation is %+v", r)
	}
	if d := r.ExpiresAt.Sub(before); d < 50*time.Second || d > 70*time.Second {
		t.Errorf("held for %v, want a minute", d)
	}
	var shown reservation
	s.do(get("/api/reservations/"+r.ID)).wants(http.StatusOK, "").into(&shown)
	if shown.ID != r.ID || shown.Status != "held" {
		t.Errorf("shown as %+v", shown)
	}

	s.do(post("/api/reservations/"+r.ID+"/confirm", "")).wants(http.StatusOK, "").into(&shown)
	if shown.Status != "confirmed" {
		t.Errorf("status is %s, want confirmed", shown.Status)
	}
	s.do(post("/api/reservations/"+r.ID+"/confirm", "{}")).wants(http.StatusConflict, "RESERVATION_NOT_HELD")
	s.do(post("/api/reservations/"+r.ID+"/cancel", "{}")).wants(http.StatusConflict, "RESERVATION_NOT_HELD")

	other := s.hold(e.ID, `"quantity":10`)
	s.do(post("/api/reservations", holdBody(e.ID, `"quantity":1`))).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
	s.do(post("/api/reservations/"+other.ID+"/cancel", "{}").as("bob")).wants(http.StatusForbidden, "NOT_YOUR_RESERVATION")
	s.do(post("/api/reservations/"+other.ID+"/cancel", "{}")).wants(http.StatusOK, "").into(&shown)
	if shown.Status != "cancelled" || s.taken(e.ID) != 2 {
		t.Errorf("after the cancel: status %s, %d seats taken", shown.Status, s.taken(e.ID))
	}

	var m event
	s.do(get("/api/events/"+e.ID)).wants(http.StatusOK, "").into(&m)
	want := map[string]string{"A1": "free", "A10": "confirmed", "B2": "confirmed"}
	for _, seat := range m.Map {
		if state, ok := want[seat.Seat]; ok && state != seat.State {
			t.Errorf("seat %s is %s, want %s", seat.Seat, seat.State, state)
		}
	}
	if len(m.Map) != 12 {
		t.Errorf("the map has %d seats", len(m.Map))
	}
}

func TestListEvents(t *testing.T) { onBoth(t, testListEvents) }

func testListEvents(t *testing.T, s *shop) {
	type page struct {
		Events []event
		Next   *string
	}
	var p page
	s.do(get("/api/events")).wants(http.StatusOK, "").into(&p)
	if p.Events == nil || len(p.Events) != 0 || p.Next != nil {
		t.Errorf("empty list is %+v", p)
	}
	for i := range 5 {
		s.event(fmt.Sprintf(`{"name":"Night %d","seats":1}`, i))
	}
	var names []string
	path := "/api/events?limit=2"
	for range 3 {
		p = page{}
		s.do(get(path)).wants(http.StatusOK, "").into(&p)
		for _, e := range p.Events {
			names = append(names, e.Name)
		}
		if p.Next != nil {
			path = "/api/events?limit=2&after=" + *p.Next
		}
	}
	if !slices.Equal(names, []string{"Night 0", "Night 1", "Night 2", "Night 3", "Night 4"}) || p.Next != nil {
		t.Errorf("pages give %q, next %v", names, p.Next)
	}
	for _, query := range []string{"limit=0", "limit=101", "limit=x", "limit=%zz", "limit=1;after=x", "after=x"} {
		s.do(get("/api/events?"+query)).wants(http.StatusBadRequest, "INVALID_REQUEST")
	}
}

func TestReplay(t *testing.T) {
	t.Parallel()
	s := newShop(t, 3)
	e := s.event(`{"name":"Concert","seats":2}`)
	hold := post("/api/reservations", holdBody(e.ID, `"quantity":2`))
	first := s.do(hold).wants(http.StatusCreated, "")
	quoted := hold.withKey(`"` + hold.key + `"`)
	for range 20 { // more than the limit: a replay costs nothing
		again := s.do(quoted).wants(http.StatusCreated, "")
		if again.Header().Get(idempotency.ReplayedHeader) != "true" || again.Body.String() != first.Body.String() {
			t.Fatalf("replay %v: %s", again.Header(), again.Body)
		}
	}
	if first.Header().Get(idempotency.ReplayedHeader) != "" {
		t.Error("the first answer says it was replayed")
	}
	s.do(hold.as("bob")).wants(http.StatusUnprocessableEntity, "IDEMPOTENCY_KEY_REUSED")
	other := hold
	other.body = holdBody(e.ID, `"quantity":1`)
	s.do(other).wants(http.StatusUnprocessableEntity, "IDEMPOTENCY_KEY_REUSED")
}

func TestRefusalsAreReplayed(t *testing.T) {
	t.Parallel()
	s := newShop(t, 0)
	e := s.event(`{"name":"Concert","seats":1}`)
	r := s.hold(e.ID, `"quantity":1`)
	late := post("/api/reservations", holdBody(e.ID, `"quantity":1`))
	s.do(late).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
	s.do(post("/api/reservations/"+r.ID+"/cancel", "")).wants(http.StatusOK, "")
	again := s.do(late).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
	if again.Header().Get(idempotency.ReplayedHeader) != "true" || s.taken(e.ID) != 0 {
		t.Errorf("the refusal was not replayed: %v", again.Header())
	}
}

func TestAnswersThatReleaseTheKey(t *testing.T) {
	t.Parallel()
	s := newShop(t, 0)
	e := s.event(`{"name":"Concert","seats":1}`)
	hold := post("/api/reservations", `{}`)
	s.do(hold).wants(http.StatusBadRequest, "INVALID_REQUEST")
	hold.body, hold.contentType = holdBody(e.ID, `"quantity":1`), "text/plain"
	s.do(hold).wants(http.StatusUnsupportedMediaType, "UNSUPPORTED_MEDIA_TYPE")
	hold.contentType = jsonType
	hold.body = holdBody("01890a5d-ac96-774b-bcce-b302099a8057", `"quantity":1`)
	s.do(hold).wants(http.StatusNotFound, "NOT_FOUND")
	hold.body = holdBody(e.ID, `"quantity":1`)
	s.do(hold).wants(http.StatusCreated, "")
}

func TestRateLimit(t *testing.T) {
	t.Parallel()
	s := newShop(t, 2)
	s.event(`{"name":"1","seats":1}`)
	s.event(`{"name":"2","seats":1}`)
	denied := post("/api/events", `{"name":"3","seats":1}`)
	a := s.do(denied).wants(http.StatusTooManyRequests, "RATE_LIMITED")
	if a.Header().Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	s.do(denied.as("bob")).wants(http.StatusCreated, "")
	s.do(get("/api/events")).wants(http.StatusOK, "")
	// A denial comes before the key is looked at, and so before the body.
	s.do(request{method: "POST", path: "/api/events", user: "ada"}).wants(http.StatusTooManyRequests, "RATE_LIMITED")
}
