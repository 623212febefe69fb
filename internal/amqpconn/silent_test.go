package amqpconn_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

const (
	timeout = 3 * time.Second // of each call that opens a session
	// vanished is the time until the publisher probes an idle broker, plus the time it waits for the answer.
	vanished = (2 + 5) * time.Second
	// pauses bounds the pauses between tries.
	pauses = 500 * time.Millisecond
)

// silences are the steps of a connection. Each has the bytes by which a Silence finds the step (the ids of class and
// method, or the text of an argument), and the time after which the publisher replaces the connection.
var silences = map[string]struct {
	testenv.Silence
	replaced time.Duration
}{
	"handshake begins":        {testenv.Silence{On: "AMQP\x00"}, timeout},
	"handshake is answered":   {testenv.Silence{On: "\x00\x0a\x00\x1e", Answer: true}, timeout},
	"virtual host opens":      {testenv.Silence{On: "\x00\x0a\x00\x28"}, timeout},
	"channel opens":           {testenv.Silence{On: "\x00\x14\x00\x0a"}, timeout},
	"confirm mode":            {testenv.Silence{On: "\x00\x55\x00\x0a"}, timeout},
	"sign of life":            {testenv.Silence{On: "\x00\x3c\x00\x0a"}, vanished},
	"exchange is looked for":  {testenv.Silence{On: "\x00\x28\x00\x0a"}, timeout},
	"exchange is found":       {testenv.Silence{On: "\x00\x28\x00\x0b", Answer: true}, timeout},
	"message":                 {testenv.Silence{On: "the body"}, vanished},
	"message, which arrives":  {testenv.Silence{On: "the body", Deliver: true}, vanished},
	"message, heard, unheard": {testenv.Silence{On: "the body", Deliver: true, OneWay: true}, vanished},
	"confirm":                 {testenv.Silence{On: "\x00\x3c\x00\x50", Answer: true}, vanished},
}

// wantTook fails the test unless the virtual time since start is want, and at most slack more.
func wantTook(t *testing.T, start time.Time, want, slack time.Duration) {
	t.Helper()
	if took := time.Since(start); took < want || took > want+slack {
		t.Errorf("took %v, want %v and up to %v more", took, want, slack)
	}
}

// onBroker runs a test in a bubble. Its connections have heartbeats that notice nothing.
func onBroker(t *testing.T, test func(t *testing.T, b *silent.AMQP)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := silent.NewAMQP(t)
		b.Queue("q", "events")
		test(t, b)
	})
}

func theBody(id string) amqpconn.Out {
	o := out("events", "", id)
	o.Message.Body = []byte("the body")
	return o
}

// A connection that falls silent at any step is replaced. Neither the confirm timeout nor heartbeats end it during
// the test.
func TestSilentConnection(t *testing.T) {
	t.Parallel()
	for name, silence := range silences {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBroker(t, func(t *testing.T, b *silent.AMQP) {
				b.SilenceOn(silence.Silence)
				p := start(t, amqpconn.PublisherConfig{Dial: b.Dial, Timeout: timeout, ConfirmTimeout: 10 * time.Minute})
				start := time.Now()
				for n := 0; ; n++ {
					fallen := b.Silenced() > 0
					err := p.Confirmed(t.Context(), theBody(fmt.Sprint(n)))
					if err == nil && fallen && p.Ready() == nil {
						break
					}
					if err != nil && !errors.Is(err, amqpconn.ErrUnavailable) || time.Since(start) > time.Minute {
						t.Fatalf("still failing: %v; %d connections fell silent", err, b.Silenced())
					}
					time.Sleep(20 * time.Millisecond)
				}
				wantTook(t, start, silence.replaced, pauses)
			})
		})
	}
}

// An idle publisher notices with its next probe; until then it would report that it is ready.
func TestSilentWhileIdle(t *testing.T) {
	t.Parallel()
	onBroker(t, func(t *testing.T, b *silent.AMQP) {
		var downs atomic.Int64
		p := start(t, amqpconn.PublisherConfig{Dial: b.Dial, Down: func(error) { downs.Add(1) }})
		testenv.Eventually(t, p.Ready)
		b.SilenceConnections()
		start := time.Now()
		testenv.Eventually(t, func() error {
			if downs.Load() == 0 {
				return errors.New("the connection is kept")
			}
			return p.Ready()
		})
		wantTook(t, start, vanished, pauses)
	})
}

// Run ends in time, whichever call hangs: a dial, the opening of the session, a confirm, the close.
func TestRunEndsOnASilentConnection(t *testing.T) {
	t.Parallel()
	kinds := map[string]testenv.Silence{"farewell": {On: "\x00\x0a\x00\x32"}, "farewell, which arrives": {On: "\x00\x0a\x00\x32", Deliver: true}}
	for name, silence := range silences {
		kinds[name] = silence.Silence
	}
	for name, silence := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBroker(t, func(t *testing.T, b *silent.AMQP) {
				b.SilenceOn(silence)
				p := amqpconn.NewPublisher(amqpconn.PublisherConfig{
					Dial: b.Dial, Logger: quiet, Timeout: 10 * time.Minute, ConfirmTimeout: 10 * time.Minute, ShutdownTimeout: time.Second,
				})
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { p.Run(ctx) })
				var l ledger
				running.Go(func() { p.Publish(t.Context(), theBody("1"), l.done("1")) })
				testenv.Eventually(t, func() error {
					if b.Silenced() == 0 && !strings.HasPrefix(name, "farewell") {
						return errors.New("nothing has fallen silent yet")
					}
					return nil
				})
				cancel()
				start := time.Now()
				running.Wait()
				wantTook(t, start, 0, 3*time.Second) // a second for the confirms and 2 s for the close
				l.confirmed(t)
			})
		})
	}
}

// hasty dials with heartbeats that notice nothing during a test.
func hasty(url string) amqpconn.Dial {
	return func(context.Context) (*amqp.Connection, error) {
		return amqp.DialConfig(url, amqp.Config{Heartbeat: 10 * time.Minute, Dial: amqp.DefaultDial(10 * time.Minute)})
	}
}

// A real connection to a real broker falls silent.
func TestSilentConnection_onRabbitMQ(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	proxy := testenv.NewProxy(t, b.URL)
	proxy.SilenceOn(silences["channel opens"].Silence)
	p := start(t, amqpconn.PublisherConfig{Dial: hasty(proxy.URL()), Timeout: time.Second})
	testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("", "q", "1")) })
	if proxy.Silenced() != 1 {
		t.Errorf("%d connections fell silent", proxy.Silenced())
	}
}

// If the broker reads nothing, the buffers on the way fill until a write blocks. (Not in a bubble, because the client
// then waits for a mutex.)
func TestSilentInTheMiddleOfAWrite(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "the connection is given up after 17 s, 10 of which are for the bytes under way")
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
