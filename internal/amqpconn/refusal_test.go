package amqpconn_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

// restricted returns a broker with the exchanges "events" and "closed", both bound to the queue "q", and a user who
// may publish only good messages to "events".
func restricted(t *testing.T) (b, user *amqptest.Broker) {
	t.Helper()
	b = amqptest.New(t)
	b.Queue(t, "q", nil)
	for _, exchange := range []string{"events", "closed"} {
		b.Exchange(t, exchange, "topic")
		b.Bind(t, "q", "#", exchange)
	}
	return b, b.User(t, "user", amqptest.Rights{Write: "^(events|amq.rabbitmq.trace)$", Topics: map[string]string{"events": "^good$"}})
}

// bad are messages that the broker rejects when the user of restricted publishes them.
var bad = map[string]func(i int) amqpconn.Out{
	"internal exchange":   func(i int) amqpconn.Out { return out("amq.rabbitmq.trace", "good", fmt.Sprint("bad ", i)) },
	"no right to write":   func(i int) amqpconn.Out { return out("closed", "good", fmt.Sprint("bad ", i)) },
	"default exchange":    func(i int) amqpconn.Out { return out("", "q", fmt.Sprint("bad ", i)) },
	"no right to a topic": func(i int) amqpconn.Out { return out("events", "bad", fmt.Sprint("bad ", i)) },
	"topics of their own": func(i int) amqpconn.Out { return out("events", fmt.Sprint("bad.", i), fmt.Sprint("bad ", i)) },
	"words of another's topic": func(i int) amqpconn.Out {
		return out("events", fmt.Sprintf("good' in exchange 'events' in vhost '%d", i), fmt.Sprint("bad ", i))
	},
	"topic too long to be named": func(i int) amqpconn.Out {
		return out("events", strings.Repeat("b", 240)+fmt.Sprint(i), fmt.Sprint("bad ", i))
	},
	"missing exchange": func(i int) amqpconn.Out { return out("missing", "good", fmt.Sprint("bad ", i)) },
}

// Each bad message fails alone, whichever messages are in flight beside it, and no connection is lost.
func TestRefusedMessageFailsAlone(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, bad := range bad {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, user := restricted(t)
			p := start(t, keeping(t, amqpconn.PublisherConfig{Dial: user.Dial, Window: 50, Channels: 4}))
			const n, every = 200, 20
			var good, refused ledger
			for i := range n {
				o := out("events", "good", fmt.Sprint(i))
				o.Stripe = uint32(i)
				p.Publish(t.Context(), o, good.done(o.Message.MessageId))
				if i%every == every/2 {
					o := bad(i)
					o.Stripe = uint32(i)
					p.Publish(t.Context(), o, refused.done(o.Message.MessageId))
				}
			}
			if got := len(good.confirmed(t)); got != n {
				t.Errorf("%d of %d good messages confirmed: %v", got, n, good.outcomes)
			}
			refused.confirmed(t)
			for id, errs := range refused.outcomes {
				if !errors.Is(errs[0], amqpconn.ErrUnroutable) {
					t.Errorf("%s: %v", id, errs[0])
				}
			}
		})
	}
}

// keeping changes the config of a publisher that must not lose its connection: a stall does not end it.
func keeping(t *testing.T, cfg amqpconn.PublisherConfig) amqpconn.PublisherConfig {
	cfg.Timeout, cfg.ConfirmTimeout = testenv.Patience, testenv.Patience
	cfg.Down = func(err error) { t.Errorf("a connection was lost: %v", err) }
	return cfg
}

// A rejection is remembered only for a while.
func TestRightsGrantedLater(t *testing.T) {
	t.Parallel()
	b, user := restricted(t)
	p := start(t, amqpconn.PublisherConfig{Dial: user.Dial})
	for _, o := range []amqpconn.Out{out("closed", "good", "1"), out("events", "bad", "2")} {
		if err := p.Confirmed(t.Context(), o); !errors.Is(err, amqpconn.ErrUnroutable) {
			t.Errorf("%s, %s: %v", o.Exchange, o.Key, err)
		}
	}
	b.User(t, "user", amqptest.Rights{Write: ".*", Topics: map[string]string{"events": ".*"}})
	for _, o := range []amqpconn.Out{out("closed", "good", "1"), out("events", "bad", "2")} {
		testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), o) })
	}
}

// An exchange that is deleted and created again works as before, on the same connection.
func TestExchangeMadeAgain(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	p := start(t, keeping(t, amqpconn.PublisherConfig{Dial: b.Dial, Channels: 2}))
	for i := range 3 {
		b.Exchange(t, "events", "topic")
		b.Bind(t, "q", "#", "events")
		testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("events", "k", fmt.Sprint(i))) })
		if err := b.Channel(t).ExchangeDelete("events", false, false); err != nil {
			t.Fatal(err)
		}
		if err := p.Confirmed(t.Context(), out("events", "k", fmt.Sprint(i))); !errors.Is(err, amqpconn.ErrUnroutable) {
			t.Errorf("deleted exchange: %v", err)
		}
	}
}

// breaking is a routing key that makes RabbitMQ 3.10 end the connection with an internal error:
// a reply address with a damaged process id.
const breaking = "amq.rabbitmq.reply-to.g1hkAA5yZXBseUAxMjcuMC4wLjEAAAABAAAAAAAAAAA=.abc"

// The broker closes the connection because of a message and does not name it. The caller must learn that, or it would
// retry all of them forever.
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
				if !errors.Is(err, amqpconn.ErrNacked) && !errors.Is(err, amqpconn.ErrUnroutable) { // releases after 3.10 return it
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

// A full queue rejects at once, while a quorum queue confirms later, several messages with one answer. The rejected
// messages among them have been answered before.
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

// A quorum queue that is no longer full accepts messages from a publisher it has rejected before.
func TestFullNoLonger(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "a quorum queue refuses messages for seconds after there is room")
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

// losingNone runs a scenario that must not lose a connection.
func losingNone(t *testing.T, scenario func(t *testing.T) (lost int64, failure error)) {
	t.Helper()
	if lost, failure := scenario(t); lost > 0 || failure != nil {
		t.Errorf("%d connections lost, %v", lost, failure)
	}
}
