package inboxtest_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

var _ driver.Publisher = (*inboxtest.Broker)(nil)

func TestNames(t *testing.T) {
	t.Parallel()
	for pattern, names := range map[string]map[string]bool{
		"":             {"": true, "a": true, "order.placed": true}, // no pattern
		"order.placed": {"order.placed": true, "order.placed.v2": false, "order": false},
		"order.*":      {"order.placed": true, "order": false, "order.a.b": false, "user.a": false},
		"order.#":      {"order.placed": true, "order": true, "order.a.b": true, "orders.a": false},
		"#.placed":     {"order.placed": true, "placed": true, "a.b.placed": true, "placed.a": false},
		"*.placed.#":   {"order.placed": true, "order.placed.v2": true, "placed": false},
	} {
		cfg := inboxtest.Config{}
		if pattern != "" {
			cfg.Names = []string{pattern}
		}
		b := newRig(t, inbox.NewMux(), cfg)
		for name, want := range names {
			m := &inbox.Message{ID: ids.New(), Name: name}
			if err := b.Send(t.Context(), m); (err == nil) != want {
				t.Errorf("%q to a queue for %q: %v", name, pattern, err)
			}
		}
	}
}

// A relay's message comes to each queue that wants it, as the consumer's message; without any it
// is unroutable.
func TestPublish(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := inboxtest.NewBroker()
		var got [2][]*inbox.Message
		ctx, stop := context.WithCancel(t.Context())
		defer synctest.Wait()
		defer stop()
		for i, queue := range []string{"billing", "mail"} {
			p := processor(func(_ context.Context, m *inbox.Message) error { got[i] = append(got[i], m); return nil })
			c, err := inboxtest.NewConsumer(broker, queue, p, inboxtest.Config{Names: []string{"order.*"}})
			if err != nil {
				t.Fatal(err)
			}
			go func() { _ = c.Run(ctx) }()
		}
		created := time.Now()
		publish := func(ctx context.Context, name string) (err error) {
			broker.Publish(ctx, driver.Message{
				ID: uuid.Must(uuid.NewV7()), Name: name, Body: []byte("{}"), ContentType: "application/json",
				Headers: map[string]string{"a": "b"}, CreatedAt: created,
			}, func(e error) { err = e })
			return err
		}
		if err := publish(t.Context(), "order.placed"); err != nil {
			t.Fatal(err)
		}
		if err := broker.Idle(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, queue := range []string{"billing", "mail"} {
			if len(got[i]) != 1 {
				t.Fatalf("%s got %d messages", queue, len(got[i]))
			}
			if m := got[i][0]; m.Queue != queue || m.Name != "order.placed" || string(m.Body) != "{}" || m.Headers["a"] != "b" ||
				m.ContentType != "application/json" || !m.PublishedAt.Equal(created) || m.Attempt != 1 {
				t.Errorf("%s got %+v", queue, m)
			}
		}
		if err := publish(t.Context(), "user.left"); driver.ClassOf(err) != driver.Unroutable {
			t.Errorf("without a queue: %v", err)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := publish(ended, "order.placed"); driver.ClassOf(err) != driver.Unavailable || !errors.Is(err, context.Canceled) {
			t.Errorf("with a context that has ended: %v", err)
		}
	})
}

// Two consumers share a queue; what one leaves when it ends is for the other.
func TestConsumersShareAQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := inboxtest.NewBroker()
		var served [2]atomic.Int64
		var stops [2]context.CancelFunc
		for i := range served {
			p := processor(func(context.Context, *inbox.Message) error {
				served[i].Add(1)
				time.Sleep(time.Second)
				return nil
			})
			c, err := inboxtest.NewConsumer(broker, "inbox", p, inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 1}})
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			stops[i] = stop
			go func() { _ = c.Run(ctx) }()
		}
		publish(t, rig{Broker: broker}, slices.Repeat([]string{"a"}, 10)...)
		time.Sleep(1500 * time.Millisecond)
		stops[0]()
		if err := broker.Idle(t.Context()); err != nil {
			t.Fatal(err)
		}
		stops[1]()
		synctest.Wait()
		if a, b := served[0].Load(), served[1].Load(); a != 2 || b != 8 {
			t.Errorf("served %d and %d", a, b)
		}
	})
}

// The settings that every consumer has work in memory, too.
func TestConsumerSettings(t *testing.T) {
	t.Parallel()
	t.Run("message limit", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			calls := 0
			b := newRig(t, processor(func(context.Context, *inbox.Message) error { calls++; return nil }),
				inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{MessageLimit: 3, Concurrency: 1}})
			publish(t, b, "a", "a", "a", "a", "a")
			if err := b.Run(t.Context()); err != nil || calls != 3 {
				t.Errorf("%d messages, error %v", calls, err)
			}
			if left := b.Idle(canceled(t)); left == nil {
				t.Error("the rest is gone")
			}
		})
	})
	t.Run("time limit", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			b := newRig(t, inbox.NewMux(), inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{TimeLimit: time.Minute}})
			start := time.Now()
			if err := b.Run(t.Context()); err != nil || time.Since(start) != time.Minute {
				t.Errorf("Run ended after %v: %v", time.Since(start), err)
			}
		})
	})
	t.Run("memory limit", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			calls := 0
			b := newRig(t, processor(func(context.Context, *inbox.Message) error { calls++; return nil }),
				inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{MemoryLimit: 1, Concurrency: 1}})
			publish(t, b, "a", "a")
			if err := b.Run(t.Context()); err != nil || calls != 1 {
				t.Errorf("%d messages, error %v", calls, err)
			}
		})
	})
	t.Run("derived ids", func(t *testing.T) {
		t.Parallel()
		id := ids.New()
		var got []uuid.UUID
		p := processor(func(_ context.Context, m *inbox.Message) error { got = append(got, m.ID); return nil })
		bubble(t, p, inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{DeriveID: func(m *inbox.Message) uuid.UUID {
			if m.Name == "bad" {
				panic("none")
			}
			return id
		}}}, func(t *testing.T, b rig, _ func()) {
			for _, name := range []string{"good", "bad"} {
				if err := b.Send(t.Context(), &inbox.Message{Name: name}); err != nil {
					t.Fatal(err)
				}
			}
			idle(t, b)
			if dead := letters(t, b, inbox.Filter{Class: "validation"}); len(dead) != 1 || dead[0].Message.Name != "bad" || !slices.Equal(got, []uuid.UUID{id}) {
				t.Errorf("dead letters %+v, processed %v", dead, got)
			}
		})
	})
	t.Run("handler timeout", func(t *testing.T) {
		t.Parallel()
		p := processor(func(ctx context.Context, _ *inbox.Message) error { <-ctx.Done(); return ctx.Err() })
		bubble(t, p, inboxtest.Config{}, func(t *testing.T, b rig, _ func()) {
			start := time.Now()
			publish(t, b, "a")
			idle(t, b)
			if took := time.Since(start); len(letters(t, b, inbox.Filter{})) != 1 || took != 6*time.Minute+31*time.Second {
				t.Errorf("given up after %v", took)
			}
		})
	})
	t.Run("runs once at a time", func(t *testing.T) {
		t.Parallel()
		bubble(t, processor(nil), inboxtest.Config{}, func(t *testing.T, b rig, _ func()) {
			if err := b.Run(t.Context()); err == nil {
				t.Error("a second Run was accepted")
			}
		})
	})
}

func canceled(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}
