package main_test

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
)

// TestOneEnding confirms and cancels the same reservations at the same time in two processes, each wish twice
// with one key: a reservation ends once, and both requests of a key are told the same.
func TestOneEnding(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	apis := startAPIs(t, s, "-user-limit=1000000")
	event := apis[0].newEvent(`{"name":"Concert","seats":40}`)
	user := newUser()
	for range 40 {
		held := apis[0].hold(user, event, `"quantity":1`)
		wishes := []string{"confirm", "cancel", "confirm", "cancel"}
		var crowd sync.WaitGroup
		answers := make([][2]string, len(wishes))
		for i, wish := range wishes {
			key := newKey()
			for j, c := range apis {
				crowd.Go(func() {
					r, err := c.untilNotInUse(user, key, "/api/reservations/"+held.ID+"/"+wish)
					answers[i][j] = fmt.Sprintf("%d %s %v", r.status, r.body, err)
					if err == nil && r.status != http.StatusOK && r.code() != "RESERVATION_NOT_HELD" {
						t.Errorf("%s is answered by %s", wish, answers[i][j])
					}
				})
			}
		}
		crowd.Wait()
		done := 0
		for i, a := range answers {
			if a[0] != a[1] {
				t.Errorf("the two requests to %s with one key are answered by\n%s and\n%s", wishes[i], a[0], a[1])
			}
			if a[0][:3] == "200" {
				done++
			}
		}
		if done != 1 {
			t.Errorf("%d wishes were granted, want 1: %q", done, answers)
		}
	}
	var changes int
	if err := pgxScan(t.Context(), s, &changes, "select count(*) from holdfast_outbox"); err != nil {
		t.Fatal(err)
	}
	if changes != 80 {
		t.Errorf("%d changes were announced, want 40 holds and 40 endings", changes)
	}
}

// untilNotInUse asks again while another request with the key is in flight.
func (c *client) untilNotInUse(user, key, path string) (reply, error) {
	for {
		r, err := c.tryPost(user, key, path, "")
		if err != nil || r.code() != "IDEMPOTENCY_KEY_IN_USE" {
			return r, err
		}
	}
}
