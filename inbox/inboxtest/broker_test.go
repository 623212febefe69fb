package inboxtest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
)

// A message comes again when it was lost on its way, before or after it was processed, and each copy
// is one of its own.
func TestConsumerDeliversAgain(t *testing.T) {
	t.Parallel()
	var deliveries []bool
	lost := map[inboxtest.Step]bool{}
	cfg := inboxtest.Config{Fault: func(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
		if (at == inboxtest.AtReceive || at == inboxtest.AtAck) && !lost[at] {
			lost[at] = true
			return inboxtest.Lose
		}
		return inboxtest.OK
	}}
	p := processor(func(_ context.Context, m *inbox.Message) error {
		deliveries = append(deliveries, m.Redelivered)
		m.Body[0] = 'x' // stays in this delivery
		if string(m.Body) != "x}" || m.Attempt != 1 {
			t.Errorf("message = %+v", m)
		}
		return nil
	})
	bubble(t, p, cfg, func(t *testing.T, b rig, _ func()) {
		publish(t, b, "a")
		idle(t, b)
		if want := []bool{true, true}; !slices.Equal(deliveries, want) { // the first one reached no queue
			t.Errorf("redelivered = %v, want %v", deliveries, want)
		}
	})
}

func TestDeliverTwice(t *testing.T) {
	t.Parallel()
	var trail []string
	p := processor(func(_ context.Context, m *inbox.Message) error {
		trail = append(trail, fmt.Sprint(m.Attempt, m.Redelivered))
		if m.Attempt == 1 {
			return errors.New("boom")
		}
		return nil
	})
	bubble(t, p, inboxtest.Config{Fault: inboxtest.DeliverTwice}, func(t *testing.T, b rig, _ func()) {
		publish(t, b, "a")
		idle(t, b)
		if want := []string{"1 false", "2 false", "2 true"}; !slices.Equal(trail, want) {
			t.Errorf("deliveries %v, want %v", trail, want)
		}
	})
}

// A step of any kind may fail once, in any way: the message is processed all the same, and the
// consumer is ready again.
func TestFaults(t *testing.T) {
	t.Parallel()
	for step := inboxtest.AtOpen; step <= inboxtest.AtClose; step++ {
		for what := inboxtest.FailBefore; what <= inboxtest.Refuse; what++ {
			t.Run(fmt.Sprintf("step %d outcome %d", step, what), func(t *testing.T) {
				t.Parallel()
				var asked atomic.Int64
				cfg := inboxtest.Config{Fault: func(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
					if at != step || asked.Add(1) > 1 {
						return inboxtest.OK
					}
					return what
				}}
				done := map[string]int{}
				var up atomic.Bool
				p := processor(func(_ context.Context, m *inbox.Message) error {
					switch {
					case m.Name == "retried" && m.Attempt == 1:
						return errors.New("boom")
					case !up.Load():
						return inbox.Unavailable(errors.New("down")) // so that the session is stopped, and messages are given back
					}
					done[m.Name]++
					return nil
				})
				bubble(t, p, cfg, func(t *testing.T, b rig, _ func()) {
					publish(t, b, "retried", "event", "event", "event")
					time.Sleep(time.Minute)
					up.Store(true)
					idle(t, b)
					if done["retried"] == 0 || done["event"] < 3 || len(letters(t, b, inbox.Filter{})) != 0 {
						t.Errorf("processed %v", done)
					}
					time.Sleep(time.Minute)
					if err := b.Ready(t.Context()); err != nil {
						t.Errorf("Ready = %v", err)
					}
				})
				if asked.Load() == 0 {
					t.Error("the step was never asked about")
				}
			})
		}
	}
}

func TestNewConsumerRefuses(t *testing.T) {
	t.Parallel()
	_, err := inboxtest.NewConsumer(nil, "", nil, inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{
		Concurrency: -1, ShutdownTimeout: -1, Retry: inbox.RetryPolicy{BaseDelay: -1},
	}})
	for _, part := range []string{"Broker", "queue", "processor", "ConsumerConfig.Concurrency", "ConsumerConfig.ShutdownTimeout", "RetryPolicy.BaseDelay"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s is not named in %v", part, err)
		}
	}
	if err := newRig(t, inbox.NewMux(), inboxtest.Config{}).Send(t.Context(), nil); err == nil {
		t.Error("a nil message was sent")
	}
}
