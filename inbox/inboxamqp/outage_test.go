package inboxamqp_test

import (
	"context"
	"sync/atomic"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

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
