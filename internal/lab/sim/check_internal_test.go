package sim

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
	"github.com/holdfast-go/holdfast/outbox"
)

// story is a schedule in which one hold was confirmed and another one expired, with its final state.
type story struct {
	history *history
	state   shoptest.State
}

var began = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func (s *story) write(name, reservation, seat string, after time.Duration) {
	body, _ := json.Marshal(message{Reservation: reservation, Event: "e", ExpiresAt: began.Add(time.Minute), Seats: []string{seat}})
	m := outbox.Message{ID: uuid.Must(uuid.NewV7()), Name: name, Key: reservation, Body: body}
	s.history.written = append(s.history.written, written{m, began.Add(after)})
	s.history.took(m.ID)
	s.history.effect(m.ID, "")
}

func newStory() *story {
	h := newHistory()
	s := &story{history: &h}
	s.write("reservation.held", "r1", "A1", 0)
	s.write("reservation.held", "r2", "A2", time.Second)
	s.write("reservation.confirmed", "r1", "A1", 2*time.Second)
	s.write("reservation.expired", "r2", "A2", time.Minute)
	h.answers["k1"] = answered{request{path: "/api/reservations", user: "u"}, answer{status: 201, body: `{"id":"r1"}`}}
	h.answers["k2"] = answered{request{path: "/api/reservations", user: "u"}, answer{status: 201, body: `{"id":"r2"}`}}
	h.answers["k3"] = answered{request{path: "/api/reservations/r1/confirm", user: "u"}, answer{status: 200}}
	h.answers["k0"] = answered{request{path: eventsPath, user: "u"}, answer{status: 201, body: `{"id":"e"}`}}
	s.state = shoptest.State{
		Reservations: map[string]shoptest.Reservation{
			"r1": {User: "u", EventID: "e", Status: "confirmed", Learned: "confirmed", Seats: []string{"A1"}},
			"r2": {User: "u", EventID: "e", Status: "expired", Learned: "expired", Seats: []string{"A2"}},
		},
		Seats: []shoptest.Seat{{EventID: "e", Name: "A1", State: "confirmed", Reservation: "r1"}, {EventID: "e", Name: "A2", State: "free"}},
	}
	return s
}

func (s *story) reservation(id string, change func(*shoptest.Reservation)) {
	r := s.state.Reservations[id]
	change(&r)
	s.state.Reservations[id] = r
}

// event records a request that creates an event. An empty answer has not arrived.
func (s *story) event(key, body string) {
	one := answered{request: request{path: eventsPath, user: "u"}}
	if body != "" {
		one.final = answer{status: 201, body: body}
	}
	s.history.answers[key] = one
}

// store adds an event with one free seat.
func (s *story) store(event string) {
	s.state.Seats = append(s.state.Seats, shoptest.Seat{EventID: event, Name: "A1", State: "free"})
}

// TestChecks: each check finds the fault that it is for, and nothing in a correct story.
func TestChecks(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		spoil func(s *story)
		want  string // empty: nothing is found
	}{
		"nothing":                      {func(*story) {}, ""},
		"a seat sold twice":            {func(s *story) { s.write("reservation.held", "r3", "A1", time.Minute) }, "was sold to r3"},
		"a reservation ends twice":     {func(s *story) { s.write("reservation.cancelled", "r1", "A1", time.Minute) }, `went from "confirmed"`},
		"expired early":                {func(s *story) { s.history.written[3].at = began.Add(time.Second) }, "was expired at"},
		"confirmed late":               {func(s *story) { s.history.written[2].at = began.Add(time.Minute) }, "was confirmed at"},
		"a lost success":               {func(s *story) { delete(s.state.Reservations, "r1") }, "is not stored"},
		"another status than answered": {func(s *story) { s.reservation("r1", func(r *shoptest.Reservation) { r.Status = "cancelled" }) }, "a client got confirmed"},
		"an effect without a request": {func(s *story) {
			s.state.Reservations["r3"] = shoptest.Reservation{User: "u", Status: "expired", Learned: "expired"}
		}, "no request explains it"},
		"a confirm without a request": {func(s *story) { delete(s.history.answers, "k3") }, "without a request"},
		"one id for two keys": {func(s *story) {
			s.history.answers["k4"] = answered{request{path: "/api/reservations", user: "u"}, answer{status: 201, body: `{"id":"r1"}`}}
		}, "answers two keys"},
		"a lost event":                             {func(s *story) { s.event("k4", `{"id":"f"}`) }, "event f is not stored"},
		"one event for two keys":                   {func(s *story) { s.event("k4", `{"id":"e"}`) }, "event e answers two keys"},
		"two events for one key":                   {func(s *story) { s.store("f") }, "event f: no request explains it"},
		"an event without its key":                 {func(s *story) { delete(s.history.answers, "k0") }, "event e: no request explains it"},
		"an event without an answer":               {func(s *story) { s.store("f"); s.event("k4", "") }, ""},
		"two events without an answer for one key": {func(s *story) { s.store("f"); s.store("g"); s.event("k4", "") }, "event g: no request explains it"},
		"a seat without a reservation":             {func(s *story) { s.state.Seats[1].State = "held" }, "seat A2 is held"},
		"still held":                               {func(s *story) { s.reservation("r2", func(r *shoptest.Reservation) { r.Status = "held" }) }, "is still held"},
		"not in the read model":                    {func(s *story) { s.reservation("r2", func(r *shoptest.Reservation) { r.Learned = "held" }) }, "the read model has"},
		"a seat of another event":                  {func(s *story) { s.state.Seats[0].EventID = "f" }, "seat A1 is confirmed"},
		"a seat lost":                              {func(s *story) { s.state.Seats[0] = shoptest.Seat{EventID: "e", Name: "A1", State: "free"} }, "too many or too few"},
		"not published":                            {func(s *story) { s.history.published = s.history.published[1:] }, "was not published"},
		"published and not there":                  {func(s *story) { s.history.took(uuid.Must(uuid.NewV7())) }, "never committed"},
		"out of order": {func(s *story) {
			p := s.history.published
			p[0], p[2] = p[2], p[0]
		}, "after a later one"},
		"published twice": {func(s *story) { s.history.took(s.history.published[0]) }, ""},
		"no effect":       {func(s *story) { delete(s.history.learned, s.history.published[0]) }, "took effect 0 times"},
		"two effects":     {func(s *story) { s.history.learned[s.history.published[0]]++ }, "took effect 2 times"},
		"left behind":     {func(s *story) { s.state.Dead = 1 }, "1 dead letters are left"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStory()
			tc.spoil(s)
			found := strings.Join(check(s.history, s.state), "\n")
			if tc.want == "" && found != "" || !strings.Contains(found, tc.want) {
				t.Errorf("found %q, want %q", found, tc.want)
			}
		})
	}
}
