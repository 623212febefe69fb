package inboxtest_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
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
	down := true
	calls := 0
	p := processor(func(_ context.Context, m *inbox.Message) error {
		calls++
		if m.Attempt != 1 {
			t.Errorf("attempt %d", m.Attempt)
		}
		if down {
			return inbox.Unavailable(errors.New("down"))
		}
		return nil
	})
	bubble(t, p, inboxtest.Config{}, func(t *testing.T, b rig, _ func()) {
		publish(t, b, "a", "b")
		time.Sleep(time.Hour)
		synctest.Wait()
		if calls < 3600 || calls > 3602 {
			t.Errorf("%d deliveries in an hour with pauses of a second", calls)
		}
		down = false
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

func TestConsumerDeliversTwiceAndCrashes(t *testing.T) {
	t.Parallel()
	var deliveries []bool
	crashes := map[inboxtest.CrashPoint]bool{inboxtest.BeforeProcess: true, inboxtest.BeforeSettle: true}
	cfg := inboxtest.Config{DeliverTwice: true, Crash: func(at inboxtest.CrashPoint, _ *inbox.Message) bool {
		defer delete(crashes, at)
		return crashes[at]
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
		// One lost before it was processed, one after, the first that counts, its repetition.
		if want := []bool{true, true, true}; !slices.Equal(deliveries, want) {
			t.Errorf("redelivered = %v, want %v", deliveries, want)
		}
	})
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
	for _, part := range []string{"Broker", "queue", "Processor", "ConsumerConfig.Concurrency", "ConsumerConfig.ShutdownTimeout", "RetryPolicy.BaseDelay"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s is not named in %v", part, err)
		}
	}
	if err := newRig(t, inbox.NewMux(), inboxtest.Config{}).Send(t.Context(), nil); err == nil {
		t.Error("a nil message was sent")
	}
}

type batchProcessor func(ctx context.Context, msgs []*inbox.Message) []error

func (p batchProcessor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	return p(ctx, msgs)
}

// What is in the queue comes together; what has failed before comes alone.
func TestConsumerBatches(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var sizes []int
		p := batchProcessor(func(_ context.Context, msgs []*inbox.Message) []error {
			sizes = append(sizes, len(msgs))
			results := make([]error, len(msgs))
			for i, m := range msgs {
				if m.Name == "bad" && m.Attempt == 1 {
					results[i] = errors.New("boom")
				}
			}
			return results
		})
		b := newRig(t, p, inboxtest.Config{DeliverTwice: true, ConsumerConfig: inbox.ConsumerConfig{
			Concurrency: 1, Batch: 4, Logger: slog.New(slog.DiscardHandler),
		}})
		publish(t, b, "a", "bad", "a", "bad", "a", "a")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- b.Run(ctx) }()
		idle(t, b)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		// 6 messages, the copies of the 4 good ones, then each bad one and its copy.
		if want := []int{4, 4, 2, 1, 1, 1, 1}; !slices.Equal(sizes, want) {
			t.Errorf("batches of %v, want %v", sizes, want)
		}
	})
}
