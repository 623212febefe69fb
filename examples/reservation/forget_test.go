package main_test

import (
	"net/http"
	"testing"

	"github.com/redis/go-redis/v9"
)

// TestRedisForgetsInFlight loses what Redis knows of a key while its request is being worked on, so that a second
// process begins the same request: the database lets one of them take effect, and both give its answer.
func TestRedisForgetsInFlight(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := newServices(t)
	apis := startAPIs(t, s)
	event := apis[0].newEvent(`{"name":"Concert","seats":5}`)
	conn, release := hold(t, s, "lock table seats in exclusive mode")

	options, err := redis.ParseURL(s.redisURL)
	if err != nil {
		t.Fatal(err)
	}
	client := redis.NewClient(options)
	defer client.Close()
	user, key, replies := newUser(), newKey(), make(chan reply, len(apis))
	for waiting, c := range apis {
		go func() {
			r, _ := c.tryPost(user, key, "/api/reservations", holdBody(event, `"seats":["A1"]`)) // a failure has status 0
			replies <- r
		}()
		awaitBlocked(t, s, conn, waiting+1)
		if n, err := client.Del(ctx, "idempotency:"+key, "idempotency:lock:"+key).Result(); err != nil || n == 0 {
			t.Fatalf("forgot %d keys: %v", n, err)
		}
	}
	release()
	first, second := <-replies, <-replies
	first.t, second.t = t, t
	first.wants(http.StatusCreated, "")
	second.wants(http.StatusCreated, "")
	if string(first.body) != string(second.body) {
		t.Errorf("answers are %s and %s", first.body, second.body)
	}
	if got := apis[0].seats(event); got["held"] != 1 {
		t.Errorf("seats are %v, want 1 held", got)
	}
	var told int
	if err := pgxScan(ctx, s, &told, "select count(*) from holdfast_outbox"); err != nil || told != 1 {
		t.Errorf("%d messages (%v), want 1", told, err)
	}
}
