package inboxamqp_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A pause does not break the channel of a queue with a single active consumer, which refuses
// basic.get.
func TestOutageWithSingleActiveConsumer(t *testing.T) {
	t.Parallel()
	opened := outage(t)
	for tries := 1; opened != 2 && tries < 3; tries++ { // a stall of seconds ends a connection
		opened = outage(t)
	}
	if opened != 2 {
		t.Errorf("%d connections, want one to receive and one to publish", opened)
	}
}

// outage returns how many connections were opened.
func outage(t *testing.T) int64 {
	t.Helper()
	b := amqptest.New(t)
	var down atomic.Bool
	var dialled atomic.Int64
	dial := func(ctx context.Context) (*amqp.Connection, error) {
		dialled.Add(1)
		return b.Dial(ctx)
	}
	b.Queue(t, "orders", amqp.Table{"x-queue-type": "quorum", "x-single-active-consumer": true})
	var handled atomic.Int64
	got := recorder{fail: func(*inbox.Message) error {
		if down.Load() {
			return inbox.Unavailable(errBroken)
		}
		handled.Add(1)
		return nil
	}}
	c := newConsumer(t, dial, &got, config{Queue: "orders", Concurrency: 2, Retry: quick})
	setUp(t, c)
	dialled.Store(0)
	r := start(t, c)
	ready(t, r)
	down.Store(true)
	const n = 10
	publishAll(t, b, "orders", "order.placed", n)
	awaitPaused(t, r)
	got.await(t, 6)
	down.Store(false)
	testenv.Eventually(t, func() error {
		if got := handled.Load(); got < n {
			return fmt.Errorf("%d of %d messages handled", got, n)
		}
		return nil
	})
	ready(t, r)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
	return dialled.Load()
}
