package faults_test

import (
	"errors"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	exchange = "faults"
	queue    = "ledger"
	// prefetch is how many messages the consumer may be given again after a session broke.
	prefetch = 100
)

// consumer writes all that the queue holds into a ledger, until stop.
type consumer struct {
	ledger.Consumer
	URL  string
	stop func()
}

// consume declares exchange and queue and starts a consumer.
func consume(t testing.TB, url string, l *ledger.Ledger) *consumer {
	t.Helper()
	must(t, ledger.OnBroker(t.Context(), url, declare))
	c := &consumer{Consumer: ledger.Consumer{Dial: ledger.At(url), Queue: queue, Prefetch: prefetch, Ledger: l}, URL: url}
	c.stop = beside(t, c.Run)
	return c
}

// declare lays out what the relays publish to.
func declare(ch *amqp.Channel) error {
	if err := ch.ExchangeDeclare(exchange, amqp.ExchangeTopic, true, false, false, false, nil); err != nil {
		return err
	}
	if _, err := ch.QueueDeclare(queue, true, false, false, false, nil); err != nil {
		return err
	}
	return ch.QueueBind(queue, "faults.#", exchange, false, nil)
}

// untilDrained waits until the queue is empty and nothing has arrived for a while: repeats too.
func (c *consumer) untilDrained(t testing.TB) {
	t.Helper()
	seen := -1
	testenv.Eventually(t, func() error {
		time.Sleep(200 * time.Millisecond)
		n := c.Ledger.Delivered()
		still := n == seen
		seen = n
		return ledger.OnBroker(t.Context(), c.URL, func(ch *amqp.Channel) error {
			q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
			if err == nil && (!still || q.Messages > 0) {
				err = errors.New("messages keep arriving")
			}
			return err
		})
	})
}

// untilTrue polls.
func untilTrue(t testing.TB, what string, check func() bool) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if !check() {
			return errors.New("not yet: " + what)
		}
		return nil
	})
}
