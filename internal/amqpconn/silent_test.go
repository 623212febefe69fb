package amqpconn_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// What passes on the wire at each step, as a Silence looks for it: the ids of class and method, or
// the text of an argument.
var silences = map[string]testenv.Silence{
	"handshake begins":        {On: "AMQP\x00"},
	"handshake is answered":   {On: "\x00\x0a\x00\x1e", Answer: true},
	"virtual host opens":      {On: "\x00\x0a\x00\x28"},
	"channel opens":           {On: "\x00\x14\x00\x0a"},
	"confirm mode":            {On: "\x00\x55\x00\x0a"},
	"sign of life":            {On: "\x00\x3c\x00\x0a"},
	"exchange is looked for":  {On: "\x00\x28\x00\x0a"},
	"exchange is found":       {On: "\x00\x28\x00\x0b", Answer: true},
	"message":                 {On: "the body"},
	"message, which arrives":  {On: "the body", Deliver: true},
	"message, heard, unheard": {On: "the body", Deliver: true, OneWay: true},
	"confirm":                 {On: "\x00\x3c\x00\x50", Answer: true},
}

// hasty dials with heartbeats that notice nothing in the time of a test.
func hasty(url string) amqpconn.Dial {
	return func(context.Context) (*amqp.Connection, error) {
		return amqp.DialConfig(url, amqp.Config{Heartbeat: 10 * time.Minute, Dial: amqp.DefaultDial(10 * time.Minute)})
	}
}

// A connection that falls silent, at any step, is replaced without anybody's help: neither the
// confirm's timeout nor the heartbeats end it within the time of the test.
func TestSilentConnection(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, silence := range silences {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			b.Queue(t, "q", nil)
			b.Exchange(t, "events", "fanout")
			b.Bind(t, "q", "", "events")
			proxy := testenv.NewProxy(t, b.URL)
			proxy.SilenceOn(silence)
			p := start(t, amqpconn.PublisherConfig{Dial: hasty(proxy.URL()), Timeout: 3 * time.Second, ConfirmTimeout: 10 * time.Minute})
			began := time.Now()
			for n := 0; ; n++ {
				o := out("events", "", fmt.Sprint(n))
				o.Message.Body = []byte("the body")
				err := p.Confirmed(t.Context(), o)
				if err == nil && proxy.Silenced() > 0 && p.Ready() == nil {
					break
				}
				if err != nil && !errors.Is(err, amqpconn.ErrUnavailable) {
					t.Fatal(err)
				}
				if time.Since(began) > testenv.Patience {
					t.Fatalf("still failing: %v; %d connections fell silent", err, proxy.Silenced())
				}
				time.Sleep(20 * time.Millisecond)
			}
			t.Logf("%.1f s", time.Since(began).Seconds())
		})
	}
}

// An idle publisher notices too, or it would say that it is ready.
func TestSilentWhileIdle(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	proxy := testenv.NewProxy(t, b.URL)
	var lost atomic.Int64
	p := start(t, amqpconn.PublisherConfig{Dial: hasty(proxy.URL()), Down: func(error) { lost.Add(1) }})
	testenv.Eventually(t, p.Ready)
	proxy.SilenceConnections()
	began := time.Now()
	testenv.Eventually(t, func() error {
		if lost.Load() == 0 {
			return errors.New("the connection is kept")
		}
		return p.Ready()
	})
	t.Logf("%.1f s", time.Since(began).Seconds())
}

// A broker that reads nothing fills the buffers on the way until a write waits.
func TestSilentInTheMiddleOfAWrite(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	proxy := testenv.NewProxy(t, b.URL)
	p := start(t, amqpconn.PublisherConfig{Dial: hasty(proxy.URL()), ConfirmTimeout: 10 * time.Minute})
	testenv.Eventually(t, p.Ready)
	proxy.Pause()
	var l ledger
	for i := range 2 {
		o := out("", "q", fmt.Sprint(i))
		o.Message.Body = make([]byte, 5<<20)
		p.Publish(t.Context(), o, l.done(o.Message.MessageId))
	}
	if got := l.confirmed(t); len(got) > 0 {
		t.Errorf("confirmed by a silent broker: %v", got)
	}
	proxy.Heal()
	testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("", "q", "after")) })
}

// Run ends in time whatever hangs: a dial, a call that opens the session, a confirm, the farewell.
func TestRunEndsOnASilentConnection(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	farewell := map[string]testenv.Silence{"farewell": {On: "\x00\x0a\x00\x32"}, "farewell, which arrives": {On: "\x00\x0a\x00\x32", Deliver: true}}
	for _, kinds := range []map[string]testenv.Silence{silences, farewell} {
		for name, silence := range kinds {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				b := amqptest.New(t)
				b.Queue(t, "q", nil)
				b.Exchange(t, "events", "fanout")
				b.Bind(t, "q", "", "events")
				proxy := testenv.NewProxy(t, b.URL)
				proxy.SilenceOn(silence)
				p := amqpconn.NewPublisher(amqpconn.PublisherConfig{
					Dial: hasty(proxy.URL()), Logger: quiet, Timeout: 10 * time.Minute, ConfirmTimeout: 10 * time.Minute, ShutdownTimeout: time.Second,
				})
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { p.Run(ctx) })
				var l ledger
				running.Go(func() {
					o := out("events", "", "1")
					o.Message.Body = []byte("the body")
					p.Publish(t.Context(), o, l.done("1"))
				})
				testenv.Eventually(t, func() error {
					if proxy.Silenced() == 0 && kinds["farewell"].On == "" {
						return errors.New("nothing has fallen silent yet")
					}
					return nil
				})
				cancel()
				began := time.Now()
				running.Wait()
				if took := time.Since(began); took > 30*time.Second { // 1 s for the confirms and 2 s for the farewell
					t.Errorf("Run ended after %v", took)
				}
				l.confirmed(t)
			})
		}
	}
}
