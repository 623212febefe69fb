package amqpconn_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// breaking is a routing key that makes RabbitMQ 3.10 end the connection with an internal error:
// a reply address with a damaged process id.
const breaking = "amq.rabbitmq.reply-to.g1hkAA5yZXBseUAxMjcuMC4wLjEAAAABAAAAAAAAAAA=.abc"

// The broker ends the connection over a message and does not say over which. Whoever tries all of
// them again must come to know it, or would try them for ever.
func TestMessageThatEndsTheSession(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	p := start(t, amqpconn.PublisherConfig{Dial: b.Dial, Window: 16, Channels: 4})
	open := map[string]amqpconn.Out{"poison": out("", breaking, "poison")}
	for i := range 40 {
		o := out("", "q", fmt.Sprint(i))
		o.Stripe = uint32(i)
		open[o.Message.MessageId] = o
	}
	testenv.Eventually(t, func() error {
		if err := p.Ready(); err != nil {
			return err
		}
		var l ledger
		for id, o := range open {
			p.Publish(t.Context(), o, l.done(id))
		}
		l.pending.Wait()
		for id, errs := range l.outcomes {
			switch err := errs[0]; {
			case errors.Is(err, amqpconn.ErrUnavailable):
				continue
			case id == "poison":
				if !errors.Is(err, amqpconn.ErrNacked) && !errors.Is(err, amqpconn.ErrUnroutable) { // later releases return it
					t.Errorf("poison: %v", err)
				}
			case err != nil:
				t.Errorf("%s: %v", id, err)
			}
			delete(open, id)
		}
		if len(open) > 0 {
			return fmt.Errorf("%d messages have no outcome", len(open))
		}
		return nil
	})
}
