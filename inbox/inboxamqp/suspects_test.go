package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A message that breaks the connection to the database each time looks like an outage. It
// must neither stop the others nor come for ever.
func TestPoisonLikeAnOutage(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]config{
		"one by one": {Concurrency: 2},
		"batches":    {Concurrency: 2, Batch: 10},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			const n = 30
			bad := map[uuid.UUID]bool{}
			got := recorder{fail: func(m *inbox.Message) error {
				if bad[m.ID] {
					return inbox.Unavailable(errBroken)
				}
				return nil
			}}
			cfg.Queue, cfg.Retry = "orders", inbox.RetryPolicy{MaxAttempts: 2, BaseDelay: 100 * time.Millisecond}
			c := newConsumer(t, b.Dial, &got, cfg)
			if err := c.Setup(t.Context()); err != nil {
				t.Fatal(err)
			}
			for i := range n {
				if i == 0 || i == 1 || i == 20 { // two side by side, at the head
					p := order()
					bad[uuid.MustParse(p.MessageId)] = true
					b.Publish(t, "", "orders", p)
				}
				b.Publish(t, "", "orders", order())
			}
			start(t, c)
			got.distinct(t, n+len(bad)) // the good ones need not wait until the bad ones are dead
			more := 0
			testenv.Eventually(t, patience, func() error { // there is always another message
				b.Publish(t, "", "orders", order())
				more++
				return depthIs(t, b, "failed.default", len(bad))
			})
			awaitDepth(t, b, "orders", 0)
			for _, d := range b.Take(t, "failed.default", len(bad), patience) {
				if !bad[uuid.MustParse(d.MessageId)] || d.Headers["holdfast-attempt"] != "2" {
					t.Errorf("dead: %s after %v attempts", d.MessageId, d.Headers["holdfast-attempt"])
				}
			}
			got.distinct(t, n+len(bad)+more)
			for _, m := range got.messages() {
				if m.Attempt != 1 && !bad[m.ID] {
					t.Errorf("a good message came as attempt %d", m.Attempt)
				}
			}
		})
	}
}

// A message that runs on while its consumer pauses does not break the channel afterwards.
func TestPauseWhileAnotherRuns(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var down atomic.Bool
	entered, release := make(chan struct{}), make(chan struct{})
	var slow, done atomic.Int64
	down.Store(true)
	r := consume(t, b, processorFunc(func(_ context.Context, m *inbox.Message) error {
		switch {
		case m.Name == "slow":
			if slow.Add(1) == 1 {
				close(entered)
			}
			<-release
		case down.Load():
			return inbox.Unavailable(errBroken)
		default:
			done.Add(1)
		}
		return nil
	}), config{Queue: "orders", Concurrency: 2, Retry: quick})
	p := order()
	p.Type = "slow"
	b.Publish(t, "", "orders", p)
	<-entered
	for range 10 {
		b.Publish(t, "", "orders", order())
	}
	awaitPaused(t, r)
	down.Store(false)
	testenv.Eventually(t, patience, func() error {
		if n := done.Load(); n < 10 {
			return fmt.Errorf("%d of 10 messages", n)
		}
		return nil
	})
	close(release)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
	if n := slow.Load(); n != 1 {
		t.Errorf("the message in work was delivered %d times: its session was lost", n)
	}
}

// A real outage costs no message an attempt, however often it comes.
func TestOutagesAreNoMessagesFault(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var down atomic.Bool
	var done atomic.Int64
	got := recorder{fail: func(m *inbox.Message) error {
		err := failWhile(&down, inbox.Unavailable(errBroken))(m)
		if err == nil {
			done.Add(1)
		}
		return err
	}}
	r := consume(t, b, &got, config{Queue: "orders", Concurrency: 4, Retry: quick})
	const n, outages = 30, 3
	for k := range outages {
		down.Store(true)
		for range n {
			b.Publish(t, "", "orders", order())
		}
		awaitPaused(t, r)
		before := len(got.messages())
		testenv.Eventually(t, patience, func() error {
			if probed := len(got.messages()) - before; probed < 3 {
				return fmt.Errorf("%d probes", probed)
			}
			return nil
		})
		down.Store(false)
		testenv.Eventually(t, patience, func() error { // what is left from one outage would fail in the next one too
			if got, want := done.Load(), int64((k+1)*n); got < want {
				return fmt.Errorf("%d of %d went through", got, want)
			}
			return nil
		})
	}
	for _, m := range got.messages() {
		if m.Attempt != 1 {
			t.Fatalf("a message lost an attempt: %d", m.Attempt)
		}
	}
}

// While the server is down, what fails by itself shows nothing about it.
func TestOutageWithInvalidMessages(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var down atomic.Bool
	down.Store(true)
	got := recorder{fail: func(m *inbox.Message) error {
		if m.Name == "bad" {
			return inbox.Invalid(errBroken)
		}
		return failWhile(&down, inbox.Unavailable(errBroken))(m)
	}}
	r := consume(t, b, &got, config{Queue: "orders", Concurrency: 1, Retry: quick})
	for range 6 {
		b.Publish(t, "", "orders", order())
		p := order()
		p.Type = "bad"
		b.Publish(t, "", "orders", p)
	}
	testenv.Eventually(t, patience, func() error {
		if b.Depth(t, "failed.validation") < 6 {
			return errors.New("not all bad ones are gone")
		}
		return nil
	})
	down.Store(false)
	awaitDepth(t, b, "orders", 0)
	ready(t, r)
	for _, m := range got.messages() {
		if m.Attempt != 1 {
			t.Fatalf("a message lost an attempt: %d", m.Attempt)
		}
	}
}

// Many messages that look like an outage, at the head of a queue to which they return, let the good
// ones pass, which then tell them from an outage.
func TestManyPoisonsLikeAnOutage(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"classic", "quorum"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			const bad, good = 60, 200
			var passed atomic.Int64
			got := recorder{fail: func(m *inbox.Message) error {
				if m.Name == "bad" {
					return inbox.Unavailable(errBroken)
				}
				passed.Add(1)
				return nil
			}}
			c := newConsumer(t, b.Dial, &got, config{
				Queue: "orders", Classic: kind == "classic", Retry: inbox.RetryPolicy{MaxAttempts: 2, BaseDelay: 100 * time.Millisecond},
			})
			if err := c.Setup(t.Context()); err != nil {
				t.Fatal(err)
			}
			publishAll(t, b, "orders", "bad", bad)
			publishAll(t, b, "orders", "order.placed", good)
			start(t, c)
			testenv.Eventually(t, 2*patience, func() error {
				if n := passed.Load(); n < good {
					return fmt.Errorf("%d of %d good messages", n, good)
				}
				return nil
			})
			testenv.Eventually(t, 3*patience, func() error { // there is always another message
				b.Publish(t, "", "orders", order())
				return depthIs(t, b, "failed.default", bad)
			})
			for _, m := range got.messages() {
				if m.Name != "bad" && m.Attempt != 1 {
					t.Errorf("a good message came as attempt %d", m.Attempt)
				}
			}
		})
	}
}

// A pause does not break the channel of a queue with a single active consumer, which refuses
// basic.get.
func TestOutageWithSingleActiveConsumer(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var down atomic.Bool
	var dialled atomic.Int64
	dial := func(ctx context.Context) (*amqp.Connection, error) {
		dialled.Add(1)
		return b.Dial(ctx)
	}
	b.Queue(t, "orders", amqp.Table{"x-queue-type": "quorum", "x-single-active-consumer": true})
	got := recorder{fail: failWhile(&down, inbox.Unavailable(errBroken))}
	c := newConsumer(t, dial, &got, config{Queue: "orders", Concurrency: 2, Retry: quick})
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	dialled.Store(0)
	r := start(t, c)
	ready(t, r)
	down.Store(true)
	const n = 10
	publishAll(t, b, "orders", "order.placed", n)
	awaitPaused(t, r)
	got.await(t, 6)
	down.Store(false)
	awaitDepth(t, b, "orders", 0)
	ready(t, r)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
	if opened := dialled.Load(); opened != 2 {
		t.Errorf("%d connections, want one to receive and one to publish", opened)
	}
}
