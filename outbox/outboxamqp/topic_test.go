package outboxamqp_test

import (
	"errors"
	"testing"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

// A message with a key has the key's slot as a second routing key, in the header CC. RabbitMQ 4 checks
// topic permissions of that key, too; RabbitMQ 3 does not.
func TestTopicPermissions_keysOfSlots(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "topic")
	b.Queue(t, "q", nil)
	b.Bind(t, "q", "order.#", "events")
	publisher := func(name, topics string) *outboxamqp.Publisher {
		user := b.User(t, name, amqptest.Rights{Write: "^events$", Topics: map[string]string{"events": topics}})
		return running(t, user.Dial, outboxamqp.Config{Exchange: "events"})
	}
	keyed := message(t, "order.placed")
	keyed.Key = "customer-7"
	plain := message(t, "order.placed")

	// A user who is allowed the slots, as the guide says, publishes both on every version.
	allowed := publisher("allowed", `^(order|holdfast\.slot)\.`)
	for _, m := range []driver.Message{keyed, plain} {
		if err := publish(t, allowed, m); err != nil {
			t.Errorf("key %q: %v", m.Key, err)
		}
	}
	// Without that right, the broker decides over the keyed message alone: the others pass.
	without := publisher("without", `^order\.`)
	arrived := 2
	for range 3 {
		var refused *driver.PublishError
		if err := publish(t, without, keyed); err == nil {
			arrived++
		} else if !errors.As(err, &refused) || refused.Class != driver.Unroutable {
			t.Errorf("key %q: %v, want it unroutable", keyed.Key, err)
		}
		if err := publish(t, without, plain); err != nil {
			t.Errorf("without a key: %v", err)
		}
		arrived++
	}
	for _, d := range b.Take(t, "q", arrived, testenv.Patience) {
		if d.RoutingKey != "order.placed" {
			t.Errorf("routing key %q", d.RoutingKey)
		}
	}
}
