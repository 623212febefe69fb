package amqpconn_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// restricted is a broker with the exchanges "events" and "closed" and the queue "q" behind both, and
// a user who may publish to "events" alone, and only what is good.
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

// bad are messages that the broker refuses, the user of restricted being who publishes them.
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

// Each bad message fails by itself, whatever is on its way beside it, and costs no connection.
func TestRefusedMessageFailsAlone(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, bad := range bad {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			losingNone(t, func(t *testing.T) (int64, error) { return refusedAmongOthers(t, bad) })
		})
	}
}

// losingNone has a scenario lose no connection. A stall of seconds ends one: it is tried three times then.
func losingNone(t *testing.T, scenario func(t *testing.T) (lost int64, failure error)) {
	t.Helper()
	lost, failure := scenario(t)
	for tries := 1; lost > 0 && tries < 3; tries++ {
		lost, failure = scenario(t)
	}
	if lost > 0 || failure != nil {
		t.Errorf("%d connections lost, %v", lost, failure)
	}
}

func refusedAmongOthers(t *testing.T, bad func(i int) amqpconn.Out) (int64, error) {
	t.Helper()
	var failures []error
	_, user := restricted(t)
	var lost atomic.Int64
	p := start(t, amqpconn.PublisherConfig{Dial: user.Dial, Window: 50, Channels: 4, Down: func(error) { lost.Add(1) }})
	const n, every = 600, 20
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
		failures = append(failures, fmt.Errorf("%d of %d good messages confirmed", got, n))
	}
	for id, errs := range good.outcomes {
		if errs[0] != nil {
			failures = append(failures, fmt.Errorf("message %s: %w", id, errs[0]))
		}
	}
	refused.confirmed(t)
	for id, errs := range refused.outcomes {
		if !errors.Is(errs[0], amqpconn.ErrUnroutable) {
			failures = append(failures, fmt.Errorf("%s: %v", id, errs[0]))
		}
	}
	return lost.Load(), errors.Join(failures...)
}

// A refusal holds as long as it is likely to.
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
	granted := time.Now()
	for _, o := range []amqpconn.Out{out("closed", "good", "1"), out("events", "bad", "2")} {
		testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), o) })
	}
	t.Logf("used %.1f s after they were granted", time.Since(granted).Seconds())
}

// An exchange that is deleted and made again works as before, without a new connection.
func TestExchangeMadeAgain(t *testing.T) {
	t.Parallel()
	losingNone(t, exchangeMadeAgain)
}

func exchangeMadeAgain(t *testing.T) (int64, error) {
	t.Helper()
	var failures []error
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	var lost atomic.Int64
	p := start(t, amqpconn.PublisherConfig{Dial: b.Dial, Channels: 2, Down: func(error) { lost.Add(1) }})
	for i := range 3 {
		b.Exchange(t, "events", "topic")
		b.Bind(t, "q", "#", "events")
		testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("events", "k", fmt.Sprint(i))) })
		if err := b.Channel(t).ExchangeDelete("events", false, false); err != nil {
			t.Fatal(err)
		}
		if err := p.Confirmed(t.Context(), out("events", "k", fmt.Sprint(i))); !errors.Is(err, amqpconn.ErrUnroutable) {
			failures = append(failures, fmt.Errorf("deleted exchange: %v", err))
		}
	}
	return lost.Load(), errors.Join(failures...)
}
