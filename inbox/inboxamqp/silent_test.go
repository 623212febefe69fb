package inboxamqp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	// soonBack is the maximum time until a connection is replaced.
	soonBack = 10 * time.Second
	// held is the maximum time until messages are processed that the broker sent to a silent connection.
	held = soonBack + silent.Notices
)

// silences are the steps of a connection. Each has the bytes on the wire that a Silence looks for (the ids of
// class and method), and the maximum time until all messages are processed.
var silences = map[string]struct {
	testenv.Silence
	within time.Duration
}{
	"handshake begins":        {testenv.Silence{On: "AMQP\x00"}, soonBack},
	"channel opens":           {testenv.Silence{On: "\x00\x14\x00\x0a"}, soonBack},
	"prefetch is set":         {testenv.Silence{On: "\x00\x3c\x00\x0a"}, soonBack},
	"consumer begins":         {testenv.Silence{On: "\x00\x3c\x00\x14"}, soonBack},
	"consumer has begun":      {testenv.Silence{On: "\x00\x3c\x00\x15", Answer: true}, held},
	"delivery":                {testenv.Silence{On: "\x00\x3c\x00\x3c", Answer: true}, held},
	"ack":                     {testenv.Silence{On: "\x00\x3c\x00\x50"}, held},
	"ack, which arrives":      {testenv.Silence{On: "\x00\x3c\x00\x50", Deliver: true}, held},
	"ack, heard, unheard":     {testenv.Silence{On: "\x00\x3c\x00\x50", Deliver: true, OneWay: true}, held},
	"confirm mode":            {testenv.Silence{On: "\x00\x55\x00\x0a"}, soonBack},
	"copy":                    {testenv.Silence{On: "\x00\x3c\x00\x28"}, soonBack},
	"copy, which arrives":     {testenv.Silence{On: "\x00\x3c\x00\x28", Deliver: true}, soonBack},
	"confirm of the copy":     {testenv.Silence{On: "\x00\x3c\x00\x50", Answer: true}, soonBack},
	"two connections at once": {testenv.Silence{On: "\x00\x3c\x00\x50", Connections: 2}, soonBack + held},
}

// hasty dials with heartbeats that are too slow to notice anything during a test.
func hasty(url string) func(context.Context) (*amqp.Connection, error) {
	return func(context.Context) (*amqp.Connection, error) {
		return amqp.DialConfig(url, amqp.Config{Heartbeat: 10 * time.Minute, Dial: amqp.DefaultDial(10 * time.Minute)})
	}
}

// onBroker runs a test in a bubble. The broker has the queues of the test's consumer, and heartbeats too slow to
// notice anything.
func onBroker(t *testing.T, test func(t *testing.T, b *silent.AMQP)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := silent.NewAMQP(t)
		b.Delay = func(exchange string, header []byte) time.Duration { // as the delay queues are declared
			_, value, _ := bytes.Cut(header, []byte("holdfast-delayS"))
			if exchange != "holdfast.delay" || len(value) < 4 {
				return 0
			}
			ms, err := strconv.Atoi(string(value[4 : 4+binary.BigEndian.Uint32(value)]))
			must(t, err)
			return time.Duration(ms) * time.Millisecond
		}
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

// A connection that falls silent at any step is replaced automatically, and each message is processed.
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
				b.SilenceOn(silence.Silence)
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
				if took := time.Since(began); took > silence.within {
					t.Errorf("took %v, want %v at most", took, silence.within)
				}
				r.stop(t)
				if depth := b.Depth("orders.failed.default"); depth > 0 {
					t.Errorf("%d dead letters", depth)
				}
			})
		})
	}
}

// An idle consumer must notice the silence of each of its connections; otherwise it would report ready.
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
		noticed := time.Since(began)
		ready(t, r)
		if took := time.Since(began); noticed > 7*time.Second+100*time.Millisecond || took > soonBack { // a poll after 2 s, an answer within 5
			t.Errorf("noticed after %v, ready after %v", noticed, took)
		}
	})
}

// Run ends within ShutdownTimeout even if servers do not answer.
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
			})
		})
	}
}
