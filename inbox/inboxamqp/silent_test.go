package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
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

// A connection that falls silent, at any step, is replaced without anybody's help, and each
// message is processed.
func TestSilentConnection(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, silence := range silences {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			proxy := testenv.NewProxy(t, b.URL)
			var done sync.Map
			processor := processorFunc(func(_ context.Context, m *inbox.Message) error {
				if m.Attempt == 1 && m.Name == "flaky" {
					return errBroken
				}
				done.Store(m.ID, true)
				return nil
			})
			setUp(t, newConsumer(t, b.Dial, processor, config{Queue: "orders", Retry: quick}))
			const n = 20
			publishAll(t, b, "orders", "order.placed", n)
			publishAll(t, b, "orders", "flaky", n)
			proxy.SilenceOn(silence)
			began := time.Now()
			r := start(t, newConsumer(t, hasty(proxy.URL()), processor, config{
				Queue: "orders", Retry: quick, ConfirmTimeout: 10 * time.Minute,
			}))
			helped := false
			testenv.Eventually(t, func() error {
				count := 0
				done.Range(func(any, any) bool { count++; return true })
				if proxy.Silenced() == max(silence.Connections, 1) && r.Ready(t.Context()) == nil && time.Since(began) > 8*time.Second && !helped {
					helped = true
					proxy.Heal() // the broker, too, notices by its heartbeats only, and has messages on the silent connection
				}
				if silenced := proxy.Silenced(); count < 2*n || silenced == 0 {
					return fmt.Errorf("%d of %d messages processed, %d connections fell silent", count, 2*n, silenced)
				}
				return r.Ready(t.Context())
			})
			t.Logf("%.1f s", time.Since(began).Seconds())
			r.stop(t)
			awaitDepth(t, b, "failed.default", 0)
		})
	}
}

// An idle consumer notices too, of each of its connections, or it would say that it is ready.
func TestSilentWhileIdle(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	proxy := testenv.NewProxy(t, b.URL)
	c := newConsumer(t, hasty(proxy.URL()), &recorder{}, config{Queue: "orders", Retry: quick})
	setUp(t, c)
	r := start(t, c)
	ready(t, r)
	proxy.SilenceConnections()
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
}

// Run ends within ShutdownTimeout, whatever does not answer.
func TestShutdownWhileSilent(t *testing.T) {
	t.Parallel()
	const shutdown = 6 * time.Second
	for name, fall := range map[string]func(p *testenv.Proxy){
		"connections are silent":      (*testenv.Proxy).SilenceConnections,
		"the broker is silent":        (*testenv.Proxy).Pause,
		"the consumer is not ended":   func(p *testenv.Proxy) { p.SilenceOn(testenv.Silence{On: "\x00\x3c\x00\x1e"}) },
		"the end is not answered":     func(p *testenv.Proxy) { p.SilenceOn(testenv.Silence{On: "\x00\x3c\x00\x1e", Deliver: true}) },
		"acknowledgements do not end": func(p *testenv.Proxy) { p.SilenceOn(testenv.Silence{On: "\x00\x3c\x00\x50", Deliver: true}) },
		"copies are not confirmed": func(p *testenv.Proxy) {
			p.SilenceOn(testenv.Silence{On: "\x00\x3c\x00\x28", Deliver: true})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			proxy := testenv.NewProxy(t, b.URL)
			started, release := make(chan struct{}, 2), make(chan struct{})
			c := newConsumer(t, hasty(proxy.URL()), processorFunc(func(_ context.Context, m *inbox.Message) error {
				started <- struct{}{}
				<-release
				if m.Name == "bad" {
					return errBroken
				}
				return nil
			}), config{Queue: "orders", Retry: quick, ShutdownTimeout: shutdown, ConfirmTimeout: 10 * time.Minute})
			setUp(t, c)
			publishAll(t, b, "orders", "bad", 1)
			publishAll(t, b, "orders", "order.placed", 1)
			r := start(t, c)
			<-started
			<-started
			fall(proxy)
			close(release)
			began := time.Now()
			r.stop(t)
			if took := time.Since(began); took > shutdown+testenv.Patience/10 {
				t.Errorf("Run took %v to end", took)
			} else {
				t.Logf("%.1f s", took.Seconds())
			}
		})
	}
}
