package main_test

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// TestCrowds sends many buyers to one event at the same moment, spread over the API processes.
func TestCrowds(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	apis := startAPIs(t, s)
	start(t, s.env(), "-backend=services", "-role=relay")
	for range 2 {
		start(t, s.env(), "-backend=services", "-role=consumer")
	}

	for _, crowd := range []struct {
		name                  string
		apis                  []*client
		buyers, each, seats   int
		wantHolds, wantRemain int
	}{
		{"200 buyers, 50 seats", apis[:1], 200, 1, 50, 50, 0},
		{"200 buyers, 50 seats, two processes", apis, 200, 1, 50, 50, 0},
		{"13 buyers of 4, 50 seats", apis[:1], 13, 4, 50, 12, 2},
		{"13 buyers of 4, 50 seats, two processes", apis, 13, 4, 50, 12, 2},
		{"1000 buyers, 1000 seats", apis[:1], 1000, 1, 1000, 1000, 0},
		{"1000 buyers, 1000 seats, two processes", apis, 1000, 1, 1000, 1000, 0},
	} {
		t.Run(crowd.name, func(t *testing.T) { // one after the other: each wants the machine for itself
			c := *crowd.apis[0]
			c.t = t
			event := c.newEvent(fmt.Sprintf(`{"name":"Rush","seats":%d}`, crowd.seats))
			holds := rush(t, crowd.apis, crowd.buyers, holdBody(event, fmt.Sprintf(`"quantity":%d`, crowd.each)))
			if holds != crowd.wantHolds {
				t.Errorf("%d holds, want %d", holds, crowd.wantHolds)
			}
			if got := c.seats(event); got["held"] != crowd.wantHolds*crowd.each || got["free"] != crowd.wantRemain {
				t.Errorf("seats are %v", got)
			}
			testenv.Eventually(t, func() error {
				if got := c.stats(event); got != (stats{Held: crowd.wantHolds}) {
					return fmt.Errorf("stats are %+v, want %d held", got, crowd.wantHolds)
				}
				return nil
			})
		})
	}
}

// rush sends a request of many buyers at once and returns how many got what they wanted. All others must
// hear SEATS_UNAVAILABLE. Two processes may collide six times in a row, though seldom, and on a busy machine
// some wait for a minute in vain: who hears of that asks again with the same key, as the answer says.
func rush(t *testing.T, apis []*client, buyers int, body string) int {
	t.Helper()
	var crowd sync.WaitGroup
	replies := make([]reply, buyers)
	errs := make([]error, buyers)
	gate := make(chan struct{})
	var collided atomic.Int64
	for i := range buyers {
		crowd.Go(func() {
			<-gate
			user, key := newUser(), newKey()
			for range 10 {
				replies[i], errs[i] = apis[i%len(apis)].tryPost(user, key, "/api/reservations", body)
				if errs[i] != nil || replies[i].status != http.StatusServiceUnavailable {
					return
				}
				if replies[i].code() == "LOCK_TIMEOUT" {
					collided.Add(1)
				}
				if errs[i] = replies[i].waitAsTold(t.Context()); errs[i] != nil {
					return
				}
			}
		})
	}
	close(gate)
	crowd.Wait()
	if n := collided.Load(); n > max(3, int64(buyers)/10) {
		t.Errorf("%d of %d buyers had to ask again", n, buyers)
	}
	holds := 0
	other := map[string]int{}
	for i, r := range replies {
		switch {
		case errs[i] != nil:
			other[errs[i].Error()]++
		case r.status == http.StatusCreated:
			holds++
		case r.status != http.StatusConflict || r.code() != "SEATS_UNAVAILABLE":
			other[fmt.Sprintf("%d %s", r.status, r.code())]++
		}
	}
	if len(other) > 0 {
		t.Errorf("neither held nor SEATS_UNAVAILABLE: %v", other)
	}
	return holds
}

// TestBuyersOfTheSameSeats wants each of some seats by name for several buyers, in overlapping pairs.
func TestBuyersOfTheSameSeats(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	apis := startAPIs(t, s)
	event := apis[0].newEvent(`{"name":"Rush","seats":10}`)
	pairs := []string{`"A1","A2"`, `"A3","A2"`, `"A3","A4"`, `"A1","A4"`, `"A5","A1"`}
	var crowd sync.WaitGroup
	var mu sync.Mutex
	taken := map[string]int{}
	for i := range 50 {
		crowd.Go(func() {
			r, err := apis[i%2].postUntilDone(newUser(), "/api/reservations", holdBody(event, `"seats":[`+pairs[i%len(pairs)]+`]`))
			mu.Lock()
			defer mu.Unlock()
			if err != nil || r.status != http.StatusCreated && (r.status != http.StatusConflict || r.code() != "SEATS_UNAVAILABLE") {
				t.Errorf("%v, answer is %d: %s", err, r.status, r.body)
				return
			}
			if r.status == http.StatusCreated {
				var held reservation
				r.into(&held)
				for _, seat := range held.Seats {
					taken[seat]++
				}
			}
		})
	}
	crowd.Wait()
	for seat, n := range taken {
		if n != 1 {
			t.Errorf("seat %s was held by %d", seat, n)
		}
	}
	if got := apis[0].seats(event); got["held"] != len(taken) || len(taken) < 2 {
		t.Errorf("%d seats were given, the map shows %v", len(taken), got)
	}
}
