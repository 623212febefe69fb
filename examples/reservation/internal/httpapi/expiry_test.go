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

// TestDeadline has no sweeper: the deadline alone decides.
func TestDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, 0)
		e := s.event(`{"name":"Concert","seats":3}`)
		r := s.hold(e.ID, `"seats":["A1","A2"]`)
		other := s.hold(e.ID, `"seats":["A3"]`)
		time.Sleep(time.Minute - time.Millisecond)
		s.do(post("/api/reservations/"+other.ID+"/confirm", "")).wants(http.StatusOK, "")
		if n := s.taken(e.ID); n != 3 {
			t.Errorf("%d seats are taken before the deadline, want 3", n)
		}
		time.Sleep(time.Millisecond)

		var shown reservation
		s.do(get("/api/reservations/"+r.ID)).wants(http.StatusOK, "").into(&shown)
		if shown.Status != "expired" || s.taken(e.ID) != 1 {
			t.Errorf("at the deadline: %s, %d seats taken", shown.Status, s.taken(e.ID))
		}
		for _, path := range []string{"/confirm", "/cancel"} {
			s.do(post("/api/reservations/"+r.ID+path, "")).wants(http.StatusConflict, "RESERVATION_EXPIRED")
		}
		s.do(post("/api/reservations", holdBody(e.ID, `"seats":["A2","A3"]`)).as("bob")).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
		s.do(post("/api/reservations", holdBody(e.ID, `"quantity":3`)).as("bob")).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
		s.do(post("/api/reservations", holdBody(e.ID, `"seats":["A2"]`)).as("bob")).wants(http.StatusCreated, "")
		s.do(post("/api/reservations", holdBody(e.ID, `"quantity":1`)).as("bob")).wants(http.StatusCreated, "")
		s.do(post("/api/reservations/"+r.ID+"/confirm", "")).wants(http.StatusConflict, "RESERVATION_EXPIRED")

		var names []string
		for _, m := range s.parts.Outbox.Pending() {
			names = append(names, m.Name)
		}
		slices.Sort(names)
		want := []string{booking.MessageConfirmed, booking.MessageExpired, booking.MessageHeld, booking.MessageHeld, booking.MessageHeld, booking.MessageHeld}
		if !slices.Equal(names, want) {
			t.Errorf("messages are %q, want %q", names, want)
		}
	})
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
