package inboxamqp_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

// A drain finishes what runs, gives back what waits, and counts nothing.
func TestDrain(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	started, release := make(chan struct{}, 10), make(chan struct{})
	r := consume(t, b, processorFunc(func(context.Context, *inbox.Message) error {
		started <- struct{}{}
		<-release
		return nil
	}), inboxamqp.Config{Queue: "orders", Retry: quick, Concurrency: 2, Prefetch: 6})
	for range 8 {
		b.Publish(t, "", "orders", order())
	}
	<-started
	<-started
	r.cancel()
	awaitDepth(t, b, "orders", 6)
	if err := r.Ready(t.Context()); err == nil {
		t.Error("ready while draining")
	}
	close(release)
	r.await(t)
	awaitDepth(t, b, "orders", 6)
	for _, d := range b.Take(t, "orders", 6, patience) {
		if d.Headers["holdfast-attempt"] != nil {
			t.Errorf("a message was counted: %v", d.Headers)
		}
	}
}

// A handler that takes longer than the budget is told so, and its message goes back.
func TestDrainBudget(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	started := make(chan struct{})
	var cause error
	r := consume(t, b, processorFunc(func(ctx context.Context, _ *inbox.Message) error {
		close(started)
		<-ctx.Done()
		cause = context.Cause(ctx)
		return inbox.Unrecoverable(ctx.Err())
	}), inboxamqp.Config{Queue: "orders", Retry: quick, ShutdownTimeout: 200 * time.Millisecond})
	b.Publish(t, "", "orders", order())
	<-started
	r.stop(t)
	if !errors.Is(cause, inbox.ErrDraining) {
		t.Errorf("cause %v", cause)
	}
	awaitDepth(t, b, "orders", 1)
	awaitDepth(t, b, "failed.unrecoverable", 0)
}

func TestLimits(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	for name, cfg := range map[string]inboxamqp.Config{
		"messages": {MessageLimit: 3},
		"time":     {TimeLimit: 300 * time.Millisecond},
		"memory":   {MemoryLimit: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg.Queue, cfg.Retry = name, quick
			var got recorder
			c := newConsumer(t, b.Dial, &got, cfg)
			if err := c.Setup(t.Context()); err != nil {
				t.Fatal(err)
			}
			for range 5 {
				b.Publish(t, "", name, order())
			}
			start(t, c).await(t)
			if n := len(got.messages()); cfg.MessageLimit > 0 && n != cfg.MessageLimit {
				t.Errorf("%d messages processed", n)
			}
			awaitDepth(t, b, name, 5-len(got.messages()))
		})
	}
}
