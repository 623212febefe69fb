package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// What passes on the wire at each step, as a Silence looks for it: the ids of class and method.
var silences = map[string]testenv.Silence{
	"handshake begins":        {On: "AMQP\x00"},
	"channel opens":           {On: "\x00\x14\x00\x0a"},
	"prefetch is set":         {On: "\x00\x3c\x00\x0a"},
	"consumer begins":         {On: "\x00\x3c\x00\x14"},
	"consumer has begun":      {On: "\x00\x3c\x00\x15", Answer: true},
	"delivery":                {On: "\x00\x3c\x00\x3c", Answer: true},
	"ack":                     {On: "\x00\x3c\x00\x50"},
	"ack, which arrives":      {On: "\x00\x3c\x00\x50", Deliver: true},
	"ack, heard, unheard":     {On: "\x00\x3c\x00\x50", Deliver: true, OneWay: true},
	"confirm mode":            {On: "\x00\x55\x00\x0a"},
	"copy":                    {On: "\x00\x3c\x00\x28"},
	"copy, which arrives":     {On: "\x00\x3c\x00\x28", Deliver: true},
	"confirm of the copy":     {On: "\x00\x3c\x00\x50", Answer: true},
	"two connections at once": {On: "\x00\x3c\x00\x50", Connections: 2},
}

// hasty dials with heartbeats that notice nothing in the time of a test.
func hasty(url string) func(context.Context) (*amqp.Connection, error) {
	return func(context.Context) (*amqp.Connection, error) {
		return amqp.DialConfig(url, amqp.Config{Heartbeat: 10 * time.Minute, Dial: amqp.DefaultDial(10 * time.Minute)})
	}
}

// onBroker runs a test in a bubble. The broker has the queues of the test's consumer and knows what its connections fall silent on; its
// heartbeats notice nothing.
func onBroker(t *testing.T, test func(t *testing.T, b *silent.AMQP)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := silent.NewAMQP(t)
		setUp(t, newConsumer(t, b.Dial, &recorder{}, config{Retry: quick}))
		test(t, b)
	})
}

// send publishes n messages of a name.
func send(t *testing.T, b *silent.AMQP, name string, n int) {
	t.Helper()
	conn, err := b.Dial(t.Context())
	must(t, err)
	defer conn.Close()
	ch, err := conn.Channel()
	must(t, err)
	must(t, ch.Confirm(false))
	for range n {
		m := order()
		m.Type = name
		confirm, err := ch.PublishWithDeferredConfirm("", "orders", false, false, m)
		must(t, err)
		confirm.Wait()
	}
}

// A connection that falls silent, at any step, is replaced without anybody's help, and each
// message is processed.
func TestSilentConnection(t *testing.T) {
	t.Parallel()
	for name, silence := range silences {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBroker(t, func(t *testing.T, b *silent.AMQP) {
				var done sync.Map
				processor := processorFunc(func(_ context.Context, m *inbox.Message) error {
					if m.Attempt == 1 && m.Name == "flaky" {
						return errBroken
					}
					done.Store(m.ID, true)
					return nil
				})
				const n = 20
				send(t, b, "order.placed", n)
				send(t, b, "flaky", n)
				b.SilenceOn(silence)
				began := time.Now()
				r := start(t, newConsumer(t, b.Dial, processor, config{Retry: quick, ConfirmTimeout: 10 * time.Minute}))
				testenv.Eventually(t, func() error {
					count := 0
					done.Range(func(any, any) bool { count++; return true })
					if silenced := b.Silenced(); count < 2*n || silenced == 0 {
						return fmt.Errorf("%d of %d messages processed, %d connections fell silent", count, 2*n, silenced)
					}
					return r.Ready(t.Context())
				})
				t.Logf("%s: %.1f s", t.Name(), time.Since(began).Seconds())
				r.stop(t)
				if depth := b.Depth("failed.default"); depth > 0 {
					t.Errorf("%d dead letters", depth)
				}
			})
		})
	}
}

// An idle consumer notices too, of each of its connections, or it would say that it is ready.
func TestSilentWhileIdle(t *testing.T) {
	t.Parallel()
	onBroker(t, func(t *testing.T, b *silent.AMQP) {
		r := start(t, newConsumer(t, b.Dial, &recorder{}, config{Retry: quick}))
		ready(t, r)
		b.SilenceConnections()
		began := time.Now()
		testenv.Eventually(t, func() error {
			if r.Ready(t.Context()) == nil {
				return errors.New("ready")
			}
			return nil
		})
		t.Logf("noticed after %.1f s", time.Since(began).Seconds())
		ready(t, r)
		t.Logf("ready after %.1f s", time.Since(began).Seconds())
	})
}

// Run ends within ShutdownTimeout, whatever does not answer.
func TestShutdownWhileSilent(t *testing.T) {
	t.Parallel()
	const shutdown = 6 * time.Second
	for name, fall := range map[string]func(b *silent.AMQP){
		"connections are silent":    (*silent.AMQP).SilenceConnections,
		"the broker is silent":      (*silent.AMQP).Pause,
		"the consumer is not ended": func(b *silent.AMQP) { b.SilenceOn(testenv.Silence{On: "\x00\x3c\x00\x1e"}) },
		"the end is not answered":   func(b *silent.AMQP) { b.SilenceOn(testenv.Silence{On: "\x00\x3c\x00\x1e", Deliver: true}) },
		"acks do not arrive":        func(b *silent.AMQP) { b.SilenceOn(testenv.Silence{On: "\x00\x3c\x00\x50", Deliver: true}) },
		"copies are not confirmed":  func(b *silent.AMQP) { b.SilenceOn(testenv.Silence{On: "\x00\x3c\x00\x28", Deliver: true}) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBroker(t, func(t *testing.T, b *silent.AMQP) {
				started, release := make(chan struct{}, 2), make(chan struct{})
				c := newConsumer(t, b.Dial, processorFunc(func(_ context.Context, m *inbox.Message) error {
					started <- struct{}{}
					<-release
					if m.Name == "bad" {
						return errBroken
					}
					return nil
				}), config{Retry: quick, ShutdownTimeout: shutdown, ConfirmTimeout: 10 * time.Minute})
				send(t, b, "bad", 1)
				send(t, b, "order.placed", 1)
				r := start(t, c)
				<-started
				<-started
				fall(b)
				close(release)
				began := time.Now()
				r.stop(t)
				if took := time.Since(began); took > shutdown {
					t.Errorf("Run took %v to end", took)
				}
				t.Logf("%.1f s", time.Since(began).Seconds())
			})
		})
	}
}
