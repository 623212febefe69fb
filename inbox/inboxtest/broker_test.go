package inboxtest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
)

func TestConsumerRetriesThenGivesUp(t *testing.T) {
	t.Parallel()
	var trail []string
	var start time.Time
	boom := errors.New("boom")
	p := processor(func(_ context.Context, m *inbox.Message) error {
		trail = append(trail, fmt.Sprintf("%s %d at %v in %s", m.Name, m.Attempt, time.Since(start), m.Queue))
		if m.Name == "bad" {
			return boom
		}
		return nil
	})
	bubble(t, p, inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{Name: "test"}}, func(t *testing.T, b rig, _ func()) {
		start = time.Now()
		published := publish(t, b, "bad", "good")
		idle(t, b)
		want := []string{
			"bad 1 at 0s in inbox", "good 1 at 0s in inbox", "bad 2 at 1s in inbox", "bad 3 at 3s in inbox",
			"bad 4 at 7s in inbox", "bad 5 at 15s in inbox", "bad 6 at 31s in inbox",
		}
		if !slices.Equal(trail, want) {
			t.Errorf("deliveries:\n%s", strings.Join(trail, "\n"))
		}
		dead := letters(t, b, inbox.Filter{})
		if len(dead) != 1 || dead[0].Message.ID != published[0] || dead[0].Class != "default" || dead[0].Attempts != 6 ||
			dead[0].Error != "boom" || dead[0].Consumer != "test" || !dead[0].FirstFailedAt.Equal(start) ||
			!dead[0].FailedAt.Equal(start.Add(31*time.Second)) {
			t.Errorf("dead letters = %+v", dead)
		}
	})
}

func TestConsumerUnavailable(t *testing.T) {
	t.Parallel()
	var up atomic.Bool
	var calls atomic.Int64
	p := processor(func(_ context.Context, m *inbox.Message) error {
		calls.Add(1)
		if m.Attempt != 1 {
			t.Errorf("attempt %d", m.Attempt)
		}
		if !up.Load() {
			return inbox.Unavailable(errors.New("down"))
		}
		return nil
	})
	bubble(t, p, inboxtest.Config{}, func(t *testing.T, b rig, _ func()) {
		publish(t, b, "a", "b")
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := calls.Load(); n < 700 || n > 4000 {
			t.Errorf("%d deliveries in an hour with a probe in 1 to 5 seconds", n)
		}
		up.Store(true)
		idle(t, b)
		if dead := letters(t, b, inbox.Filter{}); len(dead) != 0 {
			t.Errorf("dead letters = %+v", dead)
		}
	})
}

func TestConsumerPostponed(t *testing.T) {
	t.Parallel()
	n := 0
	p := processor(func(_ context.Context, m *inbox.Message) error {
		if n++; n < 20 {
			return inbox.Postpone(errors.New("not yet"), time.Hour)
		}
		if m.Attempt != 1 || !m.FirstFailedAt.IsZero() {
			t.Errorf("attempt %d, first failure %v", m.Attempt, m.FirstFailedAt)
		}
		return nil
	})
	bubble(t, p, inboxtest.Config{}, func(t *testing.T, b rig, _ func()) {
		start := time.Now()
		publish(t, b, "a")
		idle(t, b)
		if got := time.Since(start); got != 19*time.Hour {
			t.Errorf("done after %v", got)
		}
	})
}

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

func TestConsumerDrains(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		work time.Duration
		took time.Duration
		left bool
	}{
		"finishes in time": {50 * time.Second, 50 * time.Second, false},
		"is cancelled":     {58 * time.Second, 54 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			calls := 0
			p := processor(func(ctx context.Context, m *inbox.Message) error {
				calls++
				if calls > 1 {
					return nil
				}
				select {
				case <-time.After(tt.work):
					return nil
				case <-ctx.Done():
					return fmt.Errorf("cancelled: %w", context.Cause(ctx))
				}
			})
			bubble(t, p, inboxtest.Config{}, func(t *testing.T, b rig, stop func()) {
				publish(t, b, "a", "b")
				synctest.Wait()
				start := time.Now()
				stop()
				if took := time.Since(start); took != tt.took || calls != 1 {
					t.Errorf("drained in %v after %d deliveries", took, calls)
				}
				if err := b.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "not running") {
					t.Errorf("Ready = %v", err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if err := b.Idle(ctx); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Idle with a message left = %v", err)
				}
				again, stopAgain := context.WithCancel(t.Context())
				defer stopAgain()
				go func() { _ = b.Run(again) }()
				idle(t, b)
				want := 2
				if tt.left {
					want = 3
				}
				if calls != want || len(letters(t, b, inbox.Filter{})) != 0 {
					t.Errorf("%d deliveries, want %d", calls, want)
				}
			})
		})
	}
}

func TestConsumerConcurrency(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	running, most := 0, 0
	p := processor(func(context.Context, *inbox.Message) error {
		mu.Lock()
		running++
		most = max(most, running)
		mu.Unlock()
		time.Sleep(time.Second)
		mu.Lock()
		running--
		mu.Unlock()
		return nil
	})
	bubble(t, p, inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4}}, func(t *testing.T, b rig, _ func()) {
		start := time.Now()
		publish(t, b, slices.Repeat([]string{"a"}, 20)...)
		idle(t, b)
		if took := time.Since(start); took != 5*time.Second || most != 4 {
			t.Errorf("20 messages of a second took %v, %d at once", took, most)
		}
		if err := b.Ready(t.Context()); err != nil {
			t.Errorf("Ready = %v", err)
		}
	})
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
