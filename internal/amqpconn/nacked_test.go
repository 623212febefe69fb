package amqpconn_test

import (
	"errors"
	"fmt"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A full queue refuses at once, a quorum queue confirms later and several messages with one answer.
// The refused ones among these were refused before.
func TestNackedBehindOthers(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "slow", amqp.Table{"x-queue-type": "quorum"})
	b.Queue(t, "full", nil)
	b.Full(t, "full")
	p := start(t, amqpconn.PublisherConfig{Dial: b.Dial})
	const n = 400
	outcomes := make([]chan error, n)
	for i := range n {
		outcomes[i] = make(chan error, 1)
		queue := "slow"
		if i%2 == 1 {
			queue = "full"
		}
		p.Publish(t.Context(), out("", queue, fmt.Sprint(i)), func(err error) { outcomes[i] <- err })
	}
	lost := 0
	for i := range n {
		err := <-outcomes[i]
		switch full := i%2 == 1; {
		case full && err == nil:
			lost++
		case full != errors.Is(err, amqpconn.ErrNacked):
			t.Errorf("message %d: %v", i, err)
		}
	}
	if lost > 0 {
		t.Errorf("%d of %d messages that the broker refused count as confirmed", lost, n/2)
	}
}

// A quorum queue that is no longer full takes messages again from those whom it has refused some.
func TestFullNoLonger(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "full", amqp.Table{"x-queue-type": "quorum"})
	empty := b.Full(t, "full")
	p := start(t, amqpconn.PublisherConfig{Dial: b.Dial})
	testenv.Eventually(t, func() error {
		if err := p.Confirmed(t.Context(), out("", "full", "1")); !errors.Is(err, amqpconn.ErrNacked) {
			return fmt.Errorf("full: %w", err)
		}
		return nil
	})
	empty()
	testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("", "full", "2")) })
}
