package inboxamqp_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

// Operators retry, postpone and drop waiting messages of one consumer, and the counts of Stats follow. Messages of other
// consumers in the same delay queues stay.
func TestRetrying_inSharedQueues(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var broken atomic.Bool
	broken.Store(true)
	got := &recorder{fail: failWhile(&broken, errors.New("no answer from the bank"))}
	slow := inbox.RetryPolicy{BaseDelay: time.Hour, MaxDelay: time.Hour}
	c := consume(t, b, got, config{Retry: slow})
	others := consume(t, b, &recorder{fail: failWhile(&broken, errors.New("broken"))}, config{Queue: "others", Retry: slow})
	for range 3 {
		b.Publish(t, "", "orders", order())
	}
	b.Publish(t, "", "others", order())
	wantRetrying := func(c *running, want int) []inbox.DeadLetter {
		t.Helper()
		var found []inbox.DeadLetter
		testenv.Eventually(t, func() error { // brokers count with a delay
			s, err := c.Stats(t.Context())
			if err != nil || s.Retrying != want {
				return fmt.Errorf("%+v, %v, want %d", s, err, want)
			}
			if found, err = c.Retrying().List(t.Context(), inbox.Filter{}); err != nil || len(found) != want {
				return fmt.Errorf("%d listed, %v, want %d", len(found), err, want)
			}
			return nil
		})
		return found
	}
	found := wantRetrying(c, 3)
	for _, d := range found {
		if d.Error != "no answer from the bank" || d.Attempts != 1 || d.DueAt.IsZero() || !d.Omitted {
			t.Errorf("found %+v", d)
		}
	}
	one := func(i int) inbox.Filter { return inbox.Filter{IDs: []uuid.UUID{found[i].Message.ID}} }
	if moved, err := c.Retrying().Replay(t.Context(), one(0), inbox.Replay{By: "ada", Delay: 2 * time.Hour}); moved.Returned != 1 || err != nil {
		t.Errorf("postponed %+v, %v", moved, err)
	}
	wantRetrying(c, 3)
	if n, err := c.Retrying().Remove(t.Context(), one(1), inbox.Removal{By: "ada"}); n != 1 || err != nil {
		t.Errorf("removed %d, %v", n, err)
	}
	wantRetrying(c, 2)
	broken.Store(false)
	if moved, err := c.Retrying().Replay(t.Context(), one(2), inbox.Replay{By: "ada"}); moved.Returned != 1 || err != nil {
		t.Errorf("retried %+v, %v", moved, err)
	}
	all := got.await(t, 4)
	if last := all[3]; last.ID != found[2].Message.ID || last.Attempt != 2 || len(last.History) != 1 {
		t.Errorf("retried %+v", last)
	}
	if left := wantRetrying(c, 1)[0]; left.Message.ID != found[0].Message.ID || time.Until(left.DueAt) < 90*time.Minute {
		t.Errorf("left is %+v", left)
	}
	wantRetrying(others, 1)
}

// A scan looks at a bounded number of messages of all consumers, and reports that there are more.
func TestRetrying_isBounded(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	c := newConsumer(t, b.Dial, &recorder{}, config{})
	setUp(t, c)
	setUp(t, newConsumer(t, b.Dial, &recorder{}, config{Queue: "others"}))
	ch := b.Channel(t)
	p := order()
	p.Headers = amqp.Table{"holdfast-delay": "960000"}
	for range 1010 {
		must(t, ch.PublishWithContext(t.Context(), "holdfast.delay", "others", false, false, p))
	}
	b.Publish(t, "", "orders.retrying", amqp.Publishing{DeliveryMode: amqp.Persistent})
	awaitDepth(t, b, "holdfast.delay.960000", 1010)
	_, err := c.Retrying().List(t.Context(), inbox.Filter{})
	if err == nil || !strings.Contains(err.Error(), "more than 1000 messages") {
		t.Errorf("error %v", err)
	}
	awaitDepth(t, b, "holdfast.delay.960000", 1010)
}

// Operators of several processes postpone waiting messages while their connections are cut. No message is lost, and each cut
// leaves at most one further copy.
func TestRetrying_cutsLoseNothing(t *testing.T) {
	t.Parallel()
	const n, operators, rounds = 40, 3, 8
	b := amqptest.New(t)
	setUp(t, newConsumer(t, b.Dial, &recorder{}, config{}))
	for range n {
		p := order()
		p.Headers = amqp.Table{"holdfast-delay": "960000", "holdfast-due-at": time.Now().Add(16 * time.Minute).UTC().Format(time.RFC3339Nano)}
		b.Publish(t, "holdfast.delay", "orders", p)
	}
	b.Publish(t, "", "orders.retrying", amqp.Publishing{DeliveryMode: amqp.Persistent})
	awaitDepth(t, b, "holdfast.delay.960000", n)
	awaitDepth(t, b, "orders.retrying", 1)
	var working sync.WaitGroup
	var cuts atomic.Int32
	for range operators {
		proxy := testenv.NewProxy(t, b.URL)
		c := newConsumer(t, amqpconn.DialURL(proxy.URL(), amqp.Config{}), &recorder{}, config{})
		working.Go(func() {
			for range rounds {
				cut := time.AfterFunc(time.Duration(50+rand.IntN(400))*time.Millisecond, func() { // timing: at any moment of the call
					cuts.Add(1)
					proxy.CutConnections()
				})
				by := time.Duration(10+rand.IntN(50)) * time.Minute
				_, _ = c.Retrying().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "ada", Delay: by}) // the cut may end it
				cut.Stop()
			}
		})
	}
	working.Wait()
	copies, found := 0, map[string]bool{}
	testenv.Eventually(t, func() error { // the broker returns the messages of cut connections with a delay
		for name := range b.Queues(t) {
			if strings.HasPrefix(name, "holdfast.delay.") {
				for _, d := range b.Take(t, name, b.Depth(t, name), testenv.Patience) {
					copies++
					found[d.MessageId] = true
				}
			}
		}
		if len(found) < n {
			return fmt.Errorf("%d of %d messages", len(found), n)
		}
		return nil
	})
	if copies > n+int(cuts.Load()) {
		t.Errorf("%d copies of %d messages after %d cuts", copies, n, cuts.Load())
	}
}
