package main_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// TestOverdueSeatsAreOpen has no sweeper at all: a hold past its deadline is over all the same.
func TestOverdueSeatsAreOpen(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	api := start(t, s.env(), "-backend=services", "-role=api")
	c := newClient(t, api.url)
	event := c.newEvent(`{"name":"Concert","seats":3}`)
	ada, bob := newUser(), newUser()
	named := c.hold(ada, event, `"seats":["A1"]`)
	counted := c.hold(ada, event, `"quantity":2`)
	c.post(bob, newKey(), "/api/reservations", holdBody(event, `"quantity":1`)).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
	passDeadlines(t, s)
	if got := c.status(counted.ID); got != "expired" {
		t.Errorf("reservation is %s, want expired", got)
	}
	if got := c.seats(event); got["free"] != 3 {
		t.Errorf("seats are %v, want 3 free", got)
	}
	c.post(ada, newKey(), "/api/reservations/"+named.ID+"/confirm", "").wants(http.StatusConflict, "RESERVATION_EXPIRED")
	c.post(ada, newKey(), "/api/reservations/"+named.ID+"/cancel", "").wants(http.StatusConflict, "RESERVATION_EXPIRED")
	c.hold(bob, event, `"seats":["A1"]`)
	c.hold(bob, event, `"quantity":1`) // frees both seats of the reservation it takes over
	if got := c.seats(event); got["held"] != 2 || got["free"] != 1 {
		t.Errorf("seats are %v, want 2 held and 1 free", got)
	}
	passDeadlines(t, s)

	// The sweeper finds what no buyer took, and announces nothing that a buyer has announced.
	for _, want := range []string{"expired 2, poisoned 0\n", "expired 0, poisoned 0\n"} {
		if code, out, errs := command(t, s.env(), "sweep"); code != 0 || out != want {
			t.Errorf("sweep exits with %d: %q, want %q: %s", code, out, want, errs)
		}
	}
	var expired int
	if err := pgxScan(t.Context(), s, &expired, "select count(*) from holdfast_outbox where name = 'reservation.expired'"); err != nil {
		t.Fatal(err)
	}
	if expired != 4 {
		t.Errorf("%d expiries were announced, want 4", expired)
	}
}

// passDeadlines moves the deadlines of all that are held into the past: a busy machine might not get to the end of
// a short hold in time.
func passDeadlines(t *testing.T, s services) {
	t.Helper()
	var moved int
	err := pgxScan(t.Context(), s, &moved, `with seats as (update seats set held_until = now() - interval '1 second' where state = 'held'),
		due as (update reservations set expires_at = now() - interval '1 second' where status = 'held' returning id) select count(*) from due`)
	if err != nil || moved == 0 {
		t.Fatalf("moved %d deadlines: %v", moved, err)
	}
}

func awaitDeadline(t *testing.T, c *client, r reservation) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if got := c.status(r.ID); got != "expired" {
			return fmt.Errorf("reservation is %s", got)
		}
		return nil
	})
}

// TestDeadlineWhileWaiting has a confirm wait for the lock of its reservation until the deadline is over.
func TestDeadlineWhileWaiting(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	api := start(t, s.env(), "-backend=services", "-role=api", "-hold=15s")
	c := newClient(t, api.url)
	ada := newUser()
	r := c.hold(ada, c.newEvent(`{"name":"Concert","seats":3}`), `"quantity":1`)
	conn, release := hold(t, s, "select from reservations where id = $1 for update", r.ID)
	confirm := make(chan reply)
	go func() {
		answer, _ := c.tryPost(ada, newKey(), "/api/reservations/"+r.ID+"/confirm", "") // a failure has status 0
		confirm <- answer
	}()
	awaitBlocked(t, s, conn, 1)
	awaitDeadline(t, c, r)
	release()
	answer := <-confirm
	answer.t = t
	answer.wants(http.StatusConflict, "RESERVATION_EXPIRED")
	if got := c.status(r.ID); got != "expired" {
		t.Errorf("reservation is %s, and was expired before", got)
	}
}
