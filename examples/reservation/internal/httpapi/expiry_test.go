package httpapi_test

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/inbox"
)

// There is no sweeper: a hold past its deadline is over all the same, and buyers take over its seats.
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
