package main_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// TestServersComeAndGo takes each server away under load, first as a crash does, then as a cable that was
// pulled. Clients that send the same key again until they are answered get what they asked for, once.
func TestServersComeAndGo(t *testing.T) { brokers(t, testServersComeAndGo) }

func testServersComeAndGo(t *testing.T, flags ...string) {
	direct := newServices(t)
	postgres, redis, rabbit := testenv.NewProxy(t, direct.databaseURL), testenv.NewProxy(t, direct.redisURL), testenv.NewProxy(t, direct.amqpURL)
	s := services{postgres.URL(), redis.URL(), rabbit.URL()}
	shop := start(t, s.env(), slices.Concat(flags, []string{"-backend=services", "-global-limit=0", "-user-limit=1000000"})...)
	all := []*testenv.Proxy{postgres, redis, rabbit}
	if len(flags) > 0 { // nothing needs RabbitMQ
		all = all[:2]
		rabbit.Cut()
	}
	c := newClient(t, shop.url)
	event := c.newEvent(`{"name":"Stadium","seats":10000}`)

	var held, confirmed, ended atomic.Int64
	var stop atomic.Bool
	var crowd sync.WaitGroup
	for range 4 {
		crowd.Go(func() {
			user := newUser()
			for !stop.Load() {
				r, err := c.insist(user, "/api/reservations", holdBody(event, `"quantity":1`), http.StatusCreated)
				if err != nil {
					t.Error(err)
					return
				}
				var mine reservation
				r.into(&mine)
				held.Add(1)
				if ended.Add(1)%2 == 0 {
					continue
				}
				if _, err := c.insist(user, "/api/reservations/"+mine.ID+"/confirm", "", http.StatusOK); err != nil {
					t.Error(err)
					return
				}
				confirmed.Add(1)
			}
		})
	}
	underLoad := func() { // until more was done
		t.Helper()
		from := ended.Load()
		testenv.Eventually(t, func() error {
			if n := ended.Load() - from; n < 20 && !t.Failed() {
				return fmt.Errorf("%d more reservations", n)
			}
			return nil
		})
	}
	for _, server := range all {
		for _, fault := range []struct{ begin, end func() }{
			{server.Cut, server.Heal}, {server.DropReplies, server.Heal}, {server.Pause, server.Resume},
		} {
			underLoad()
			fault.begin()
			awaitUnready(t, c)
			fault.end()
		}
	}
	underLoad()
	stop.Store(true)
	crowd.Wait()
	if t.Failed() {
		return
	}

	want := stats{Held: int(held.Load() - confirmed.Load()), Confirmed: int(confirmed.Load())}
	testenv.Eventually(t, func() error {
		if got := c.stats(event); got != want {
			return fmt.Errorf("stats are %+v, want %+v", got, want)
		}
		return nil
	})
	if got := c.seats(event); got["held"] != want.Held || got["confirmed"] != want.Confirmed {
		t.Errorf("seats are %v, want %+v", got, want)
	}
	awaitReady(t, shop.url)
	shop.stop()
	for line := range strings.Lines(shop.stderr.String()) {
		if !strings.HasPrefix(line, "time=") {
			t.Errorf("logged in a form of its own: %s", line)
		}
	}
}

func awaitUnready(t *testing.T, c *client) {
	t.Helper()
	testenv.Eventually(t, func() error {
		r, err := c.tryGet("/readyz")
		if err == nil && r.status != http.StatusServiceUnavailable {
			err = fmt.Errorf("ready without a server: %s", r.body)
		}
		return err
	})
}

// insist sends a request again, with the same key, until it has the wanted answer. In between it may hear only
// that the shop cannot answer now, or that the first try is still being worked on.
func (c *client) insist(user, path, body string, want int) (reply, error) {
	key := newKey()
	for end := time.Now().Add(2 * patience); ; <-time.After(50 * time.Millisecond) {
		r, err := c.tryPost(user, key, path, body)
		if err != nil || r.status == want {
			return r, err
		}
		if r.status != http.StatusServiceUnavailable && r.code() != "IDEMPOTENCY_KEY_IN_USE" {
			return r, fmt.Errorf("answer is %d: %s", r.status, r.body)
		}
		if r.header.Get("Retry-After") == "" {
			return r, fmt.Errorf("no Retry-After in %d: %s", r.status, r.body)
		}
		if time.Now().After(end) {
			return r, fmt.Errorf("after two minutes the answer is still %d: %s", r.status, r.body)
		}
	}
}
