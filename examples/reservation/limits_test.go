package main_test

import (
	"strings"
	"testing"
	"time"
)

// A process ends by itself at each limit, as after a signal, and not before.
func TestLimits(t *testing.T) {
	brokers(t, func(t *testing.T, flags ...string) {
		s := newServices(t)
		api := start(t, s.env(), append(flags, "-backend=services", "-role=api", "-user-limit=1000", "-memory-limit=8G")...)
		role := func(args ...string) *process {
			return start(t, s.env(), append(append(flags, "-backend=services"), args...)...)
		}
		relay, consumer := role("-role=relay", "-message-limit=3"), role("-role=consumer", "-message-limit=3")
		c := newClient(t, api.url)
		event := c.newEvent(`{"name":"Concert","seats":50}`)
		for range 2 {
			c.hold(newUser(), event, `"quantity":1`)
		}
		began := time.Now()
		sweeper, _ := launch(t, s.env(), append(flags, "-backend=services", "-role=sweeper", "-time-limit=2s")...)
		sweeper.endsAt(t, "it has run for ")
		if took := time.Since(began); took < 2*time.Second {
			t.Errorf("a time limit of 2 s is over after %v", took)
		}
		for _, p := range []*process{relay, consumer} {
			select {
			case <-p.ended:
				t.Errorf("ended after two messages\n%s", p.stderr)
			default:
			}
		}
		c.hold(newUser(), event, `"quantity":1`)
		relay.endsAt(t, "it has handled 3 messages")
		consumer.endsAt(t, "it has handled 3 messages")
		sweeper, _ = launch(t, s.env(), append(flags, "-backend=services", "-role=sweeper", "-memory-limit=1M")...)
		sweeper.endsAt(t, "bytes of memory")
	})
}

// endsAt waits until the process has ended of its own accord, with exit code 0, at a limit.
func (p *process) endsAt(t *testing.T, limit string) {
	t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		t.Fatalf("still there\n%s", p.stderr)
	}
	if p.err != nil || !strings.Contains(p.stderr.String(), limit) {
		t.Errorf("ended with %v, want 0 and %q\n%s", p.err, limit, p.stderr)
	}
}
