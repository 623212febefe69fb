package httpapi_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
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
		t.Error("the first answer is marked as replayed")
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
	// A denial comes before the check of the key, and so before the body.
	s.do(request{method: "POST", path: "/api/events", user: "ada"}).wants(http.StatusTooManyRequests, "RATE_LIMITED")
}

const unknownID = "01890a5d-ac96-774b-bcce-b302099a8057"

// TestBadInput sends bad input of every kind to every route, and checks that nothing was written.
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
			t.Errorf("limits of %v are accepted", limits)
		}
	}
}

// A shop without idempotency keys bounds bodies, too.
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

// Without a sweeper a hold past its deadline is over, too, and buyers take over its seats.
func TestDeadline(t *testing.T) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) { testDeadline(t, newShop(t, 0), func() { time.Sleep(time.Minute) }) })
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		s := newPostgresShop(t)
		testDeadline(t, s, func() { // moves the deadline of every hold into the past
			_, err := s.pool.Exec(t.Context(), `with seats as (update seats set held_until = now() - interval '1 second' where state = 'held')
				update reservations set expires_at = now() - interval '1 second' where status = 'held'`)
			noError(t, err)
		})
	})
}

func testDeadline(t *testing.T, s *shop, expire func()) {
	e := s.event(`{"name":"Concert","seats":3}`)
	named, counted := s.hold(e.ID, `"seats":["A1"]`), s.hold(e.ID, `"quantity":2`)
	s.do(post("/api/reservations", holdBody(e.ID, `"quantity":1`)).as("bob")).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
	expire()
	var shown reservation
	s.do(get("/api/reservations/"+counted.ID)).wants(http.StatusOK, "").into(&shown)
	if shown.Status != "expired" || s.taken(e.ID) != 0 {
		t.Errorf("past the deadline: %s, %d seats taken", shown.Status, s.taken(e.ID))
	}
	for _, path := range []string{"/confirm", "/cancel"} {
		s.do(post("/api/reservations/"+named.ID+path, "")).wants(http.StatusConflict, "RESERVATION_EXPIRED")
	}
	for _, rest := range []string{`"seats":["A1"]`, `"quantity":1`} { // the second frees both seats of the hold it takes over
		s.do(post("/api/reservations", holdBody(e.ID, rest)).as("bob")).wants(http.StatusCreated, "")
	}
	if s.taken(e.ID) != 2 || s.messages() != 6 {
		t.Errorf("%d seats taken, %d messages, want 2, and 6 of 4 holds and 2 expiries", s.taken(e.ID), s.messages())
	}
}

// run runs relay, consumer and sweeper until the returned function is called.
func (s *shop) run() (stop func()) {
	ctx, cancel := context.WithCancel(s.t.Context())
	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{s.parts.Relay.Run, s.parts.Consumer.Run, s.parts.Sweeper.Run} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				s.t.Error(err)
			}
		})
	}
	return func() {
		cancel()
		running.Wait()
	}
}

func (s *shop) wantsStats(eventID string, want booking.Stats) {
	s.t.Helper()
	var got booking.Stats
	s.do(get("/api/events/"+eventID+"/stats")).wants(http.StatusOK, "").into(&got)
	if got != want {
		s.t.Errorf("stats are %+v, want %+v", got, want)
	}
}

func TestStatsAndSweeper(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, 0)
		defer s.run()()
		e := s.event(`{"name":"Concert","seats":9}`)
		s.wantsStats(e.ID, booking.Stats{})
		confirmed, cancelled := s.hold(e.ID, `"quantity":2`), s.hold(e.ID, `"quantity":2`)
		s.hold(e.ID, `"quantity":2`)
		s.do(post("/api/reservations/"+confirmed.ID+"/confirm", "")).wants(http.StatusOK, "")
		s.do(post("/api/reservations/"+cancelled.ID+"/cancel", "")).wants(http.StatusOK, "")
		time.Sleep(5 * time.Second)
		s.wantsStats(e.ID, booking.Stats{Held: 1, Confirmed: 1, Cancelled: 1})
		time.Sleep(time.Minute)
		s.wantsStats(e.ID, booking.Stats{Expired: 1, Confirmed: 1, Cancelled: 1})
		if n := s.taken(e.ID); n != 2 {
			t.Errorf("%d seats are taken after the sweep, want 2", n)
		}
	})
}

// TestStatsInAnyOrder delivers the messages backwards, and twice.
func TestStatsInAnyOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, 0)
		e := s.event(`{"name":"Concert","seats":9}`)
		r := s.hold(e.ID, `"quantity":2`)
		s.hold(e.ID, `"quantity":2`)
		s.do(post("/api/reservations/"+r.ID+"/confirm", "")).wants(http.StatusOK, "")
		msgs := s.parts.Outbox.Pending()
		slices.Reverse(msgs)
		for _, m := range append(msgs, msgs...) {
			noError(t, s.parts.Broker.Send(t.Context(), &inbox.Message{ID: m.ID, Name: m.Name, Body: m.Body}))
		}
		defer s.run()() // the relay sends all of them once more
		time.Sleep(10 * time.Second)
		s.wantsStats(e.ID, booking.Stats{Held: 1, Confirmed: 1})
	})
}

// onBoth runs a test on both back ends.
func onBoth(t *testing.T, test func(t *testing.T, s *shop)) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		test(t, newShop(t, 0))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		test(t, newPostgresShop(t))
	})
}

// newPostgresShop is newShop on a real database; keys and limits stay in memory.
func newPostgresShop(t *testing.T) *shop {
	t.Helper()
	pool := pgtest.New(t)
	must := func(err error) {
		t.Helper()
		noError(t, err)
	}
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(err)
	must(store.Migrate(t.Context()))
	must(postgres.Migrate(t.Context(), pool))
	parts, err := memory.Open(memory.Config{})
	must(err)
	transactor, err := txretry.New(pool, txretry.Config{})
	must(err)
	once, err := idempotencypgx.New(transactor, idempotencypgx.Config{Gate: parts.Keys})
	must(err)
	must(once.Migrate(t.Context()))
	holds, err := expirypgx.New(transactor, "reservations", expirypgx.Config{PollOnly: true})
	must(err)
	backend := postgres.NewShop(pool, once, store, holds, flow.New())
	return &shop{
		t: t, handler: newHandler(t, parts, backend, 1_000_000), pool: pool,
		messages: func() (n int) {
			must(pool.QueryRow(t.Context(), "select count(*) from holdfast_outbox").Scan(&n))
			return n
		},
	}
}

// A confirm waits for the lock of its reservation until the deadline is over.
func TestPostgres_deadlineWhileWaiting(t *testing.T) {
	t.Parallel()
	s := newPostgresShop(t)
	r := s.hold(s.event(`{"name":"Concert","seats":3}`).ID, `"quantity":1`)
	tx, err := s.pool.Begin(t.Context())
	noError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }() // it is over already
	const lock = "update reservations set expires_at = clock_timestamp() where id = $1"
	if _, err := tx.Exec(t.Context(), lock, r.ID); err != nil {
		t.Fatal(err)
	}
	confirm := make(chan answer)
	go func() { confirm <- s.do(post("/api/reservations/"+r.ID+"/confirm", "")) }()
	testenv.Eventually(t, func() error {
		var waiting int
		err := s.pool.QueryRow(t.Context(), "select count(*) from pg_stat_activity where $1::integer = any(pg_blocking_pids(pid))", tx.Conn().PgConn().PID()).Scan(&waiting)
		if err == nil && waiting == 0 {
			err = errors.New("nothing waits for the lock")
		}
		return err
	})
	_, err = tx.Exec(t.Context(), lock, r.ID) // a moment after the other transaction began
	noError(t, errors.Join(err, tx.Commit(t.Context())))
	(<-confirm).wants(http.StatusConflict, "RESERVATION_EXPIRED")
}

// insist sends a request again, with its key, while the shop cannot answer it.
func (s *shop) insist(r request) answer {
	for {
		if a := s.do(r); a.Code != http.StatusServiceUnavailable {
			return a
		}
	}
}

// Many buyers want overlapping pairs of seats at once: each seat goes to one of them.
func TestPostgres_sellsEachSeatOnce(t *testing.T) {
	t.Parallel()
	s := newPostgresShop(t)
	e := s.event(`{"name":"Rush","seats":10}`)
	pairs := []string{`"A1","A2"`, `"A3","A2"`, `"A3","A4"`, `"A1","A4"`, `"A5","A1"`}
	var crowd sync.WaitGroup
	var mu sync.Mutex
	sold := map[string]int{}
	for i := range 50 {
		crowd.Go(func() {
			a := s.insist(post("/api/reservations", holdBody(e.ID, `"seats":[`+pairs[i%len(pairs)]+`]`)).as(fmt.Sprint("user-", i)))
			mu.Lock()
			defer mu.Unlock()
			var held reservation
			if a.Code == http.StatusCreated {
				a.into(&held)
			} else if a.Code != http.StatusConflict {
				t.Errorf("answer is %d: %s", a.Code, a.Body)
			}
			for _, seat := range held.Seats {
				sold[seat]++
			}
		})
	}
	crowd.Wait()
	for seat, n := range sold {
		if n != 1 {
			t.Errorf("seat %s was sold %d times", seat, n)
		}
	}
	if taken := s.taken(e.ID); taken != len(sold) || taken < 2 {
		t.Errorf("%d seats were sold, %d are taken", len(sold), taken)
	}
}

// Reservations are confirmed and cancelled at the same time, each twice: each ends once.
func TestPostgres_endsAReservationOnce(t *testing.T) {
	t.Parallel()
	s := newPostgresShop(t)
	const reservations = 10
	e := s.event(`{"name":"Concert","seats":10}`)
	for range reservations {
		held := s.hold(e.ID, `"quantity":1`)
		var crowd sync.WaitGroup
		var ended atomic.Int32
		for _, wish := range []string{"confirm", "cancel", "confirm", "cancel"} {
			crowd.Go(func() {
				switch a := s.insist(post("/api/reservations/"+held.ID+"/"+wish, "")); a.Code {
				case http.StatusOK:
					ended.Add(1)
				case http.StatusConflict:
				default:
					t.Errorf("%s is answered by %d %s", wish, a.Code, a.Body)
				}
			})
		}
		crowd.Wait()
		if n := ended.Load(); n != 1 {
			t.Errorf("a reservation ended %d times", n)
		}
	}
	if n := s.messages(); n != 2*reservations {
		t.Errorf("%d messages, want one of each hold and one of each end", n)
	}
}
