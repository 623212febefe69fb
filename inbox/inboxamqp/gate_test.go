package inboxamqp_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func awaitPaused(t *testing.T, r *running) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if r.Ready(t.Context()) == nil {
			return errors.New("ready")
		}
		return nil
	})
}

// When all messages fail the consumer stops after a few, and goes on when one succeeds.
func TestKillSwitch(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var failing atomic.Bool
	failing.Store(true)
	got := recorder{fail: failWhile(&failing, errBroken)}
	r := consume(t, b, &got, inboxamqp.Config{
		Queue: "orders", Concurrency: 2, KillSwitch: inboxamqp.KillSwitch{Ratio: 0.5, Window: 10},
		Retry: inbox.RetryPolicy{BaseDelay: 20 * time.Second},
	})
	const n = 100
	for range n {
		b.Publish(t, "", "orders", order())
	}
	awaitPaused(t, r)
	if tried := len(got.messages()); tried < 10 || tried > 20 {
		t.Errorf("%d messages failed before the switch", tried)
	}
	failing.Store(false)
	ready(t, r)
	awaitDepth(t, b, "orders", 0)
	r.stop(t)
	attempts := 0
	for _, m := range got.messages() {
		attempts = max(attempts, m.Attempt)
	}
	if attempts != 1 {
		t.Errorf("a message was tried %d times", attempts)
	}
}

// Bad messages among good ones are no reason to stop.
func TestKillSwitchSpares(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var n atomic.Int64
	r := consume(t, b, processorFunc(func(context.Context, *inbox.Message) error {
		switch n.Add(1) % 4 {
		case 0:
			return errBroken
		case 1:
			return inbox.Unrecoverable(errBroken)
		}
		return nil
	}), inboxamqp.Config{
		Queue: "orders", KillSwitch: inboxamqp.KillSwitch{Ratio: 0.5, Window: 10}, Retry: inbox.RetryPolicy{MaxAttempts: 1},
	})
	for range 60 {
		b.Publish(t, "", "orders", order())
	}
	testenv.Eventually(t, patience, func() error {
		if err := r.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n.Load() < 60 {
			return errors.New("not all processed")
		}
		return nil
	})
}

// While Health fails no message is tried at all.
func TestHealth(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var down atomic.Bool
	down.Store(true)
	var asked atomic.Int64
	var got recorder
	c := newConsumer(t, b.Dial, &got, inboxamqp.Config{Queue: "orders", Retry: quick, Health: func(context.Context) error {
		asked.Add(1)
		if down.Load() {
			return errBroken
		}
		return nil
	}})
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.Publish(t, "", "orders", order())
	r := start(t, c)
	testenv.Eventually(t, patience, func() error {
		if asked.Load() < 3 {
			return errors.New("not asked")
		}
		return nil
	})
	if err := r.Ready(t.Context()); err == nil || len(got.messages()) != 0 {
		t.Errorf("%d messages tried, ready %v", len(got.messages()), err)
	}
	down.Store(false)
	got.await(t, 1)
	ready(t, r)
	down.Store(true)
	awaitPaused(t, r)
}
