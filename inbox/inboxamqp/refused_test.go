package inboxamqp_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Bad messages whose dead-letter queue takes none, more than the prefetch and at the head of the
// queue, let the good ones pass. They end where they belong as soon as they can.
func TestDeadLetterQueueTakesNone(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]func(t *testing.T, b *amqptest.Broker, kind amqp.Table) (mend func()){
		"full": func(t *testing.T, b *amqptest.Broker, kind amqp.Table) func() {
			b.Queue(t, "failed.validation", kind)
			return b.Full(t, "failed.validation")
		},
		"missing": func(t *testing.T, b *amqptest.Broker, kind amqp.Table) func() {
			return func() { b.Queue(t, "failed.validation", kind) }
		},
	} {
		for _, kind := range []string{"classic", "quorum"} {
			for _, retries := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/%s/retry queues %v", name, kind, retries), func(t *testing.T) {
					t.Parallel()
					b := amqptest.New(t)
					b.Queue(t, "orders", amqp.Table{"x-queue-type": kind})
					mend := tt(t, b, amqp.Table{"x-queue-type": kind})
					var got recorder
					c := newConsumer(t, b.Dial, processorFunc(func(ctx context.Context, m *inbox.Message) error {
						if m.Name == "bad" {
							return inbox.Invalid(errBroken)
						}
						return got.Process(ctx, []*inbox.Message{m})[0]
					}), config{Queue: "orders", Retry: quick, Classic: kind == "classic"})
					if retries {
						for _, step := range driver.Steps(quick) {
							b.Queue(t, fmt.Sprintf("orders.retry.%d", step.Milliseconds()), amqp.Table{
								"x-message-ttl": step.Milliseconds(), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders",
							})
						}
					}
					const bad, good = 40, 100
					publishAll(t, b, "orders", "bad", bad)
					publishAll(t, b, "orders", "order.placed", good)
					r := start(t, c)
					got.distinct(t, good)
					testenv.Eventually(t, func() error {
						if err := r.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "failed.validation") {
							return fmt.Errorf("ready: %v", err)
						}
						return nil
					})
					mend()
					letters := 0
					for letters < bad {
						d := b.Take(t, "failed.validation", 1, 3*patience)[0]
						if d.Type == "filler" {
							continue
						}
						letters++
						if d.Headers["holdfast-attempt"] != "1" {
							t.Errorf("a dead letter after %v attempts", d.Headers["holdfast-attempt"])
						}
					}
					ready(t, r)
					r.stop(t)
					awaitDepth(t, b, "orders", 0)
				})
			}
		}
	}
}
