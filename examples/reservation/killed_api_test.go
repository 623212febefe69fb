package main_test

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// TestKilledAPIs kills API processes in the middle of requests. Clients send the same key again, to whichever
// process is there, and get one reservation for it.
func TestKilledAPIs(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	run := func() *process {
		return start(t, s.env(), "-backend=services", "-role=api", "-global-limit=0", "-user-limit=1000000")
	}
	var now [2]atomic.Pointer[process]
	for i := range now {
		now[i].Store(run())
	}
	c := newClient(t, now[0].Load().url)
	event := c.newEvent(`{"name":"Stadium","seats":10000}`)

	var done atomic.Int64
	var stop atomic.Bool
	var crowd sync.WaitGroup
	for i := range 8 {
		crowd.Go(func() {
			for !stop.Load() {
				key, user := newKey(), newUser()
				for try, end := i, time.Now().Add(2*patience); ; try++ {
					mine := *c
					mine.url = now[try%2].Load().url
					r, err := mine.tryPost(user, key, "/api/reservations", holdBody(event, `"quantity":1`))
					if err == nil && r.status == http.StatusCreated {
						done.Add(1)
						break
					}
					retry := err != nil || r.status == http.StatusServiceUnavailable || r.code() == "IDEMPOTENCY_KEY_IN_USE"
					if !retry || time.Now().After(end) {
						t.Errorf("%v, answer is %d: %s", err, r.status, r.body)
						return
					}
					<-time.After(50 * time.Millisecond)
				}
			}
		})
	}
	for round := range 4 {
		from := done.Load()
		testenv.Eventually(t, func() error {
			if n := done.Load() - from; n < 50 && !t.Failed() {
				return fmt.Errorf("%d reservations", n)
			}
			return nil
		})
		now[round%2].Load().kill()
		now[round%2].Store(run())
	}
	stop.Store(true)
	crowd.Wait()
	var made, told int
	for sql, n := range map[string]*int{"select count(*) from reservations": &made, "select count(*) from holdfast_outbox": &told} {
		if err := pgxScan(t.Context(), s, n, sql); err != nil {
			t.Fatal(err)
		}
	}
	if want := int(done.Load()); made != want || told != want {
		t.Errorf("%d reservations and %d messages for %d keys", made, told, want)
	}
}
