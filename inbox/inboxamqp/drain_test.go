package inboxamqp_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
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
	}), config{Queue: "orders", Retry: quick, Concurrency: 2, Prefetch: 6})
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
	}), config{Queue: "orders", Retry: quick, ShutdownTimeout: 10 * time.Second})
	b.Publish(t, "", "orders", order())
	<-started
	r.stop(t)
	if !errors.Is(cause, inbox.ErrDraining) {
		t.Errorf("cause %v", cause)
	}
	awaitDepth(t, b, "orders", 1)
	awaitDepth(t, b, "failed.unrecoverable", 0)
}

// meetingLedger notes ends of runs only when there are as many at once.
type meetingLedger struct {
	driver.Ledger
	missing, timedOut atomic.Int64
	all               chan struct{}
}

func (l *meetingLedger) End(ctx context.Context, m *inbox.Message) error {
	if l.missing.Add(-1) == 0 {
		close(l.all)
	}
	select {
	case <-l.all:
		return l.Ledger.End(ctx, m)
	case <-ctx.Done():
		l.timedOut.Add(1)
		return ctx.Err()
	}
}

// Handlers that ignore the end of their context are left behind: their messages go back
// uncounted, and a ledger that hangs delays the end by one call, not by one for each.
func TestDrainLeavesHandlersBehind(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	const n = 3
	ledger := &meetingLedger{Ledger: memory.NewLedger(), all: make(chan struct{})}
	ledger.missing.Store(n)
	started, release := make(chan struct{}, n), make(chan struct{})
	t.Cleanup(func() { close(release) })
	r := consume(t, b, processorFunc(func(context.Context, *inbox.Message) error {
		started <- struct{}{}
		<-release
		return errBroken
	}), config{
		Queue: "orders", Retry: quick, Ledger: ledger, Concurrency: n, HandlerTimeout: 20 * time.Millisecond, ShutdownTimeout: 3 * time.Second,
	})
	for range n {
		b.Publish(t, "", "orders", attempt(2))
	}
	for range n {
		<-started
	}
	r.stop(t)
	if m, late := ledger.missing.Load(), ledger.timedOut.Load(); m != 0 || late != 0 {
		t.Errorf("%d runs were not noted as survived, %d not beside the others", m, late)
	}
	for _, d := range b.Take(t, "orders", n, patience) {
		if d.Headers["holdfast-attempt"] != "2" {
			t.Errorf("a message was counted: %v", d.Headers)
		}
	}
}

// A context that cannot end is not taken for one that has.
func TestRunOnBackground(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	got := recorder{fail: func(m *inbox.Message) error {
		if m.Attempt == 1 {
			return errBroken // so that a copy is published, too
		}
		return nil
	}}
	c := newConsumer(t, b.Dial, &got, config{Queue: "orders", Retry: quick, MessageLimit: 2})
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Run(context.Background()) }()
	testenv.Eventually(t, patience, func() error { return c.Ready(t.Context()) })
	b.Publish(t, "", "orders", order())
	select {
	case err := <-ended:
		if seen := got.messages(); err != nil || len(seen) != 2 || seen[1].Attempt != 2 {
			t.Errorf("Run = %v after %d deliveries", err, len(seen))
		}
	case <-time.After(patience):
		t.Fatal("Run does not end at its limit")
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	for name, cfg := range map[string]config{
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
