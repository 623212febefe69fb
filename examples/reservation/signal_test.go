package main_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// TestSignalWhileServersAreSilent ends each role while no server answers, on old connections or on new ones. Requests
// in hand have 20 s, then services as long, then connections 2 s: a process without a request or a message in hand
// has nothing but its connections to wait for.
func TestSignalWhileServersAreSilent(t *testing.T) {
	t.Parallel()
	const slack = 18 * time.Second
	for name, tc := range map[string]struct {
		role  string
		busy  bool
		drain time.Duration
	}{
		"all, busy": {"all", true, 42 * time.Second},
		"api, busy": {"api", true, 42 * time.Second},
		"api, idle": {"api", false, 2 * time.Second},
		"relay":     {"relay", false, 22 * time.Second},
		"consumer":  {"consumer", false, 22 * time.Second},
		"a sweeper": {"sweeper", false, 22 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := newServices(t)
			api := start(t, direct.env(), "-backend=services", "-role=api", "-hold=1s", "-user-limit=1000")
			postgres, redis, rabbit := testenv.NewProxy(t, direct.databaseURL), testenv.NewProxy(t, direct.redisURL), testenv.NewProxy(t, direct.amqpURL)
			s := services{postgres.URL(), redis.URL(), rabbit.URL()}
			p := start(t, s.env(), "-backend=services", "-role="+tc.role, "-hold=1s", "-sweep=@every 1s")
			awaitReady(t, p.url)
			c := newClient(t, api.url)
			event := c.newEvent(`{"name":"Concert","seats":50}`)
			c.hold(newUser(), event, `"quantity":1`)
			for _, proxy := range []*testenv.Proxy{postgres, redis, rabbit} {
				proxy.SilenceConnections()
				proxy.Pause()
			}
			if tc.busy {
				mine := newClient(t, p.url)
				go func() { _, _ = mine.tryPost(newUser(), newKey(), "/api/reservations", holdBody(event, `"quantity":1`)) }()
			}
			c.hold(newUser(), event, `"quantity":1`) // which a relay, a consumer and a sweeper would hear of
			awaitUnready(t, newClient(t, p.url))
			began := time.Now()
			p.stop()
			took := time.Since(began)
			t.Logf("ended after %v", took)
			if took > tc.drain+slack {
				t.Errorf("ended after %v, want %v", took, tc.drain)
			}
		})
	}
}
