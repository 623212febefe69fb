package httpapi_test

import (
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
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
	if d := r.ExpiresAt.Sub(before); d < 50*time.Second || d > 70*time.Second { // timing: two times that the service gave
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

const unknownID = "01890a5d-ac96-774b-bcce-b302099a8057"

// TestBadInput tries everything that is refused, on every route, and then looks that nothing was written.
func TestBadInput(t *testing.T) { onBoth(t, testBadInput) }

func testBadInput(t *testing.T, s *shop) {
	e := s.event(`{"name":"Concert","seats":10}`)
	r := s.hold(e.ID, `"seats":["A1"]`)
	deep := strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000)
	events, reservations := "/api/events", "/api/reservations"

	for name, c := range map[string]struct {
		request
		status int
		code   string
	}{
		"unknown route":                   {post("/api/nothing", "{}"), 404, "NOT_FOUND"},
		"root":                            {get("/"), 200, ""},
		"method of the root":              {post("/", "{}"), 405, "METHOD_NOT_ALLOWED"},
		"trailing slash":                  {get("/api/events/"), 404, "NOT_FOUND"},
		"unknown route before method":     {request{method: "BREW", path: "/api/x"}, 404, "NOT_FOUND"},
		"event that is no id":             {get("/api/events/x"), 404, "NOT_FOUND"},
		"event id with a NUL":             {get("/api/events/%00"), 404, "NOT_FOUND"},
		"unknown event":                   {get("/api/events/" + unknownID), 404, "NOT_FOUND"},
		"unknown reservation":             {get("/api/reservations/" + unknownID), 404, "NOT_FOUND"},
		"confirm an unknown reservation":  {post("/api/reservations/"+unknownID+"/confirm", ""), 404, "NOT_FOUND"},
		"hold at an unknown event":        {post(reservations, holdBody(unknownID, `"quantity":1`)), 404, "NOT_FOUND"},
		"hold at no event id":             {post(reservations, holdBody("x'; --", `"quantity":1`)), 404, "NOT_FOUND"},
		"method of events":                {request{method: "DELETE", path: events}, 405, "METHOD_NOT_ALLOWED"},
		"method of stats before the user": {request{method: "POST", path: events + "/" + e.ID + "/stats"}, 405, "METHOD_NOT_ALLOWED"},

		"no user":               {post(events, "{}").as(""), 400, "USER_REQUIRED"},
		"no user before no key": {post(events, "{}").as("").withKey(""), 400, "USER_REQUIRED"},
		"long user":             {post(events, "{}").as(strings.Repeat("x", 65)), 400, "USER_REQUIRED"},
		"no key":                {post(events, "{").withKey(""), 400, "IDEMPOTENCY_KEY_REQUIRED"},
		"no key on hold":        {post(reservations, "{}").withKey(""), 400, "IDEMPOTENCY_KEY_REQUIRED"},
		"no key on confirm":     {post(reservations+"/"+r.ID+"/confirm", "").withKey(""), 400, "IDEMPOTENCY_KEY_REQUIRED"},
		"bad key before body":   {post(events, "{").withKey("x"), 400, "IDEMPOTENCY_KEY_INVALID"},

		"no content type":     {withType(post(events, "{}"), ""), 415, "UNSUPPORTED_MEDIA_TYPE"},
		"wrong content type":  {withType(post(events, "{}"), "text/xml"), 415, "UNSUPPORTED_MEDIA_TYPE"},
		"type of a confirm":   {withType(post(reservations+"/"+r.ID+"/confirm", "{}"), "text/plain"), 415, "UNSUPPORTED_MEDIA_TYPE"},
		"huge event":          {post(events, `{"name":"`+strings.Repeat("x", 1<<20)+`"}`), 413, "REQUEST_TOO_LARGE"},
		"huge confirm":        {post(reservations+"/"+r.ID+"/confirm", strings.Repeat(" ", 1<<20+1)), 413, "REQUEST_TOO_LARGE"},
		"no body":             {post(events, ""), 400, "INVALID_REQUEST"},
		"malformed":           {post(events, `{"name":`), 400, "INVALID_REQUEST"},
		"deep":                {post(events, `{"name":`+deep+`}`), 400, "INVALID_REQUEST"},
		"deep confirm":        {post(reservations+"/"+r.ID+"/confirm", deep), 400, "INVALID_REQUEST"},
		"trailing data":       {post(events, `{"name":"x","seats":1}{}`), 400, "INVALID_REQUEST"},
		"not an object":       {post(events, `"x"`), 400, "INVALID_REQUEST"},
		"not UTF-8":           {post(events, "{\"name\":\"\xff\",\"seats\":1}"), 400, "INVALID_REQUEST"},
		"unknown member":      {post(events, `{"name":"x","seats":1,"price":2}`), 400, "INVALID_REQUEST"},
		"member in capitals":  {post(events, `{"Name":"x","seats":1}`), 400, "INVALID_REQUEST"},
		"member twice":        {post(events, `{"name":"x","seats":1,"seats":2}`), 400, "INVALID_REQUEST"},
		"member of a confirm": {post(reservations+"/"+r.ID+"/confirm", `{"force":true}`), 400, "INVALID_REQUEST"},

		"event without name":    {post(events, `{"seats":1}`), 400, "INVALID_REQUEST"},
		"event with NUL":        {post(events, `{"name":"a\u0000b","seats":1}`), 400, "INVALID_REQUEST"},
		"event with long name":  {post(events, `{"name":"`+strings.Repeat("x", 201)+`","seats":1}`), 400, "INVALID_REQUEST"},
		"event without seats":   {post(events, `{"name":"x"}`), 400, "INVALID_REQUEST"},
		"event with many seats": {post(events, `{"name":"x","seats":10001}`), 400, "INVALID_REQUEST"},

		"no event id":         {post(reservations, `{"quantity":1}`), 400, "INVALID_REQUEST"},
		"neither":             {post(reservations, `{"event_id":"`+e.ID+`"}`), 400, "INVALID_REQUEST"},
		"both":                {post(reservations, holdBody(e.ID, `"seats":["A2"],"quantity":1`)), 400, "INVALID_REQUEST"},
		"quantity 0":          {post(reservations, holdBody(e.ID, `"quantity":0`)), 400, "INVALID_REQUEST"},
		"quantity 1000000000": {post(reservations, holdBody(e.ID, `"quantity":1000000000`)), 400, "INVALID_REQUEST"},
		"quantity too many":   {post(reservations, holdBody(e.ID, `"quantity":11`)), 409, "SEATS_UNAVAILABLE"},
		"no seats":            {post(reservations, holdBody(e.ID, `"seats":[]`)), 400, "INVALID_REQUEST"},
		"seat twice":          {post(reservations, holdBody(e.ID, `"seats":["A2","A2"]`)), 400, "INVALID_REQUEST"},
		"unknown seat":        {post(reservations, holdBody(e.ID, `"seats":["A2","B1"]`)), 400, "INVALID_REQUEST"},
		"seat is taken":       {post(reservations, holdBody(e.ID, `"seats":["A2","A1"]`)), 409, "SEATS_UNAVAILABLE"},
	} {
		t.Run(name, func(t *testing.T) {
			own := *s
			own.t = t
			a := own.do(c.request).wants(c.status, c.code)
			if c.status == http.StatusMethodNotAllowed && a.Header().Get("Allow") == "" {
				t.Error("no Allow header")
			}
		})
	}

	if n := s.taken(e.ID); n != 1 {
		t.Errorf("%d seats are taken after all refusals, want 1", n)
	}
	var list struct{ Events []event }
	s.do(get(events)).wants(http.StatusOK, "").into(&list)
	if len(list.Events) != 1 {
		t.Errorf("there are %d events after all refusals, want 1", len(list.Events))
	}
	if n := s.messages(); n != 1 {
		t.Errorf("there are %d messages after all refusals, want 1", n)
	}
}

func TestDoubledHeaders(t *testing.T) {
	t.Parallel()
	s := newShop(t, 0)
	r := post("/api/events", `{"name":"x","seats":1}`)
	r.header = http.Header{httpapi.UserHeader: {"ada", "bob"}}
	s.do(r).wants(http.StatusBadRequest, "USER_REQUIRED")
	r.header = http.Header{idempotency.Header: {r.key, r.key}}
	s.do(r).wants(http.StatusBadRequest, "IDEMPOTENCY_KEY_INVALID")
	r.header = http.Header{"Content-Type": {jsonType, "text/plain"}}
	s.do(r).wants(http.StatusUnsupportedMediaType, "UNSUPPORTED_MEDIA_TYPE")
	r.header = http.Header{"Content-Type": {jsonType, jsonType}}
	s.do(r).wants(http.StatusUnsupportedMediaType, "UNSUPPORTED_MEDIA_TYPE")
}

func withType(r request, contentType string) request {
	r.contentType = contentType
	return r
}

func TestLimitsAtConstruction(t *testing.T) {
	t.Parallel()
	s := newShop(t, 0)
	for _, limits := range [][2]int{{0, 0}, {-1, 0}, {1, -1}} {
		_, err := httpapi.New(httpapi.Config{
			Backend: s.parts.Shop, Keys: s.parts.Keys, Limiter: s.parts.Limiter, UserLimit: limits[0], GlobalLimit: limits[1],
		})
		if err == nil {
			t.Errorf("limits of %v are taken", limits)
		}
	}
}

// A shop without idempotency keys bounds bodies as well.
func TestWithout_keysBodiesAreBounded(t *testing.T) {
	t.Parallel()
	s := newShop(t, 0)
	handler, err := httpapi.New(httpapi.Config{Backend: s.parts.Shop, Limiter: s.parts.Limiter, UserLimit: 10, Logger: slog.New(slog.DiscardHandler)})
	noError(t, err)
	s.handler = handler
	if got := s.do(post("/api/events", `{"name":"`+strings.Repeat("x", 1<<20)+`"}`)); got.Code != http.StatusRequestEntityTooLarge {
		t.Errorf("status %d: %s", got.Code, got.Body)
	}
}
