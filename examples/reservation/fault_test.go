package main_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// TestKilledRelaysAndConsumers kills every relay and every consumer in the middle
// of the work, twice, and wants each message to arrive and to count once.
func TestKilledRelaysAndConsumers(t *testing.T) { brokers(t, testKilledRelaysAndConsumers) }

func testKilledRelaysAndConsumers(t *testing.T, flags ...string) {
	const (
		reservations = 2000
		buyers       = 16
	)
	s := newServices(t)
	shop := func(args ...string) *process {
		return start(t, s.env(), slices.Concat(flags, []string{"-backend=services"}, args)...)
	}
	api := shop("-role=api", "-global-limit=0", "-user-limit=1000000")
	behind := func() []*process {
		var all []*process
		for _, role := range []string{"relay", "relay", "consumer", "consumer"} {
			all = append(all, shop("-role="+role))
		}
		return all
	}
	running := behind()
	c := newClient(t, api.url)
	event := c.newEvent(`{"name":"Stadium","seats":2000}`)

	// Every buyer holds seats one by one and confirms every second one: two messages then.
	var done, failed atomic.Int64
	var crowd sync.WaitGroup
	for range buyers {
		crowd.Go(func() {
			user := newUser()
			for range reservations / buyers {
				if err := buy(c, user, event, done.Add(1)%2 == 0); err != nil {
					failed.Add(1)
					t.Error(err)
					return
				}
			}
		})
	}
	for _, mark := range []int64{reservations / 3, 2 * reservations / 3} {
		testenv.Eventually(t, func() error {
			if n := done.Load(); n < mark && failed.Load() == 0 {
				return fmt.Errorf("%d of %d reservations", n, mark)
			}
			return nil
		})
		for _, p := range running {
			p.kill()
		}
		running = behind()
	}
	crowd.Wait()
	if t.Failed() {
		return
	}

	want := stats{Held: reservations / 2, Confirmed: reservations / 2}
	testenv.Eventually(t, func() error {
		if got := c.stats(event); got != want {
			return fmt.Errorf("stats are %+v, want %+v", got, want)
		}
		return nil
	})
	// Nobody heard of anything twice: one message per held, two per confirmed reservation.
	for what, sql := range map[string]string{
		"reservations told in the wrong number of messages": "select count(*) from reservation_states where messages <> rank",
		"reservations whose status is told wrong": `select count(*) from reservations r
			full join reservation_states s on s.reservation_id = r.id where r.status is distinct from s.status`,
		"messages left in the outbox": "select count(*) from holdfast_outbox",
	} {
		testenv.Eventually(t, func() error {
			var n int
			if err := pgxScan(t.Context(), s, &n, sql); err != nil {
				return err
			}
			if n != 0 {
				return fmt.Errorf("%d %s", n, what)
			}
			return nil
		})
	}
	for _, p := range append(running, api) {
		p.stop()
	}
}

// buy holds a seat and, if asked to, confirms it.
func buy(c *client, user, event string, confirm bool) error {
	r, err := c.postUntilDone(user, "/api/reservations", holdBody(event, `"quantity":1`))
	if err != nil || r.status != http.StatusCreated {
		return fmt.Errorf("hold is answered by %d %s (%v)", r.status, r.body, err)
	}
	if !confirm {
		return nil
	}
	var held reservation
	if err := json.Unmarshal(r.body, &held); err != nil {
		return err
	}
	r, err = c.postUntilDone(user, "/api/reservations/"+held.ID+"/confirm", "")
	if err != nil || r.status != http.StatusOK {
		return fmt.Errorf("confirm is answered by %d %s (%v)", r.status, r.body, err)
	}
	return nil
}

// postUntilDone does what a client should: after a 503 it waits as told and sends the same key again.
func (c *client) postUntilDone(user, path, body string) (reply, error) {
	key := newKey()
	for try := 1; ; try++ {
		r, err := c.tryPost(user, key, path, body)
		if err != nil || r.status != http.StatusServiceUnavailable || try == 10 {
			return r, err
		}
		if err := r.waitAsTold(c.t.Context()); err != nil {
			return r, err
		}
		if err := r.waitAsTold(c.t.Context()); err != nil {
			return r, err
		}
	}
}
