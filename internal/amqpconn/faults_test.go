package amqpconn_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestNotConnected(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	p := start(t, amqpconn.PublisherConfig{Dial: func(context.Context) (*amqp.Connection, error) { return nil, refused }})
	err := p.Confirmed(t.Context(), out("", "q", "1"))
	if !errors.Is(err, amqpconn.ErrUnavailable) || !errors.Is(err, refused) {
		t.Errorf("publish: %v", err)
	}
	if err := p.Ready(); !errors.Is(err, amqpconn.ErrUnavailable) {
		t.Errorf("ready: %v", err)
	}
}

// The connection is lost again and again while messages are published.
func TestConnectionLost(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	proxy, dial := through(t, b)
	p := start(t, amqpconn.PublisherConfig{Dial: dial, Window: 32, Channels: 3})
	var l ledger
	stop := make(chan struct{})
	var publishing sync.WaitGroup
	publishing.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond): // timing: a message each millisecond
				o := out("", "q", fmt.Sprint(i))
				o.Stripe = uint32(i)
				p.Publish(t.Context(), o, l.done(o.Message.MessageId))
			}
		}
	})
	for i := range 3 {
		testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("", "q", fmt.Sprint("before ", i))) })
		proxy.CutConnections()
	}
	testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("", "q", "after")) })
	close(stop)
	publishing.Wait()
	confirmed := l.confirmed(t)
	if len(confirmed) == 0 || len(confirmed) == len(l.outcomes) {
		t.Fatalf("%d of %d confirmed: the fault did not hit", len(confirmed), len(l.outcomes))
	}
	arrived := map[string]bool{}
	for _, d := range b.Take(t, "q", b.Depth(t, "q"), testenv.Patience) {
		arrived[d.MessageId] = true
	}
	for _, id := range confirmed {
		if !arrived[id] {
			t.Errorf("message %s was confirmed and is not there", id)
		}
	}
}

// through dials a broker through a network that can be cut.
func through(t *testing.T, b *amqptest.Broker) (*testenv.Proxy, func(context.Context) (*amqp.Connection, error)) {
	t.Helper()
	proxy := testenv.NewProxy(t, b.URL)
	return proxy, func(context.Context) (*amqp.Connection, error) { return amqp.Dial(proxy.URL()) }
}

// silenced returns a publisher whose broker has confirmed one message to the queue "q", and says
// nothing more until the proxy resumes.
func silenced(t *testing.T, cfg amqpconn.PublisherConfig) (*amqpconn.Publisher, *testenv.Proxy) {
	t.Helper()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	proxy, dial := through(t, b)
	cfg.Dial = dial
	p := start(t, cfg)
	testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("", "q", "first")) })
	proxy.Pause()
	return p, proxy
}

// A caller that leaves is told soon, and its places in the window stay accounted for.
func TestCallerLeaves(t *testing.T) {
	t.Parallel()
	p, proxy := silenced(t, amqpconn.PublisherConfig{Window: 4})
	ctx, cancel := context.WithCancel(t.Context())
	var l ledger
	for _, id := range []string{"1", "2", "3", "4"} {
		p.Publish(ctx, out("", "q", id), l.done(id))
	}
	cancel()
	for _, id := range []string{"5", "6"} {
		p.Publish(ctx, out("", "q", id), l.done(id))
	}
	if got := l.confirmed(t); len(got) != 0 {
		t.Errorf("confirmed: %v", got)
	}
	proxy.Resume()
	for i := range 20 {
		if err := p.Confirmed(t.Context(), out("", "q", fmt.Sprint("after ", i))); err != nil {
			t.Fatal(err)
		}
	}
}

// A place whose caller has left is not lost to a broker that never confirms.
func TestCallerLeavesSilentBroker(t *testing.T) {
	t.Parallel()
	down := make(chan struct{}, 100)
	p, _ := silenced(t, amqpconn.PublisherConfig{
		Timeout: time.Second, ConfirmTimeout: time.Second, Window: 4, Down: func(error) { down <- struct{}{} },
	})
	for len(down) > 0 {
		<-down
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond) // timing: it must pass
	defer cancel()
	if err := p.Confirmed(ctx, out("", "q", "1")); !errors.Is(err, amqpconn.ErrUnavailable) {
		t.Fatal(err)
	}
	select {
	case <-down:
	case <-time.After(testenv.Patience):
		t.Error("the connection is kept")
	}
}

// The Done channel of context.Background is nil. A publisher that runs on it works like any other,
// also after it has lost its connection.
func TestRunOnBackground(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	ended, last := make(chan struct{}), make(chan struct{})
	proxy, dial := through(t, b)
	p := amqpconn.NewPublisher(amqpconn.PublisherConfig{Dial: dial, Logger: quiet, Down: func(error) {
		select {
		case <-last:
			runtime.Goexit() // nothing else ends Run
		default:
		}
	}})
	var running sync.WaitGroup
	running.Go(func() {
		defer close(ended)
		p.Run(context.Background())
	})
	for _, id := range []string{"first", "after a fault"} {
		testenv.Eventually(t, func() error { return p.Confirmed(context.Background(), out("", "q", id)) })
		select {
		case <-ended:
			t.Fatal("Run has ended")
		default:
		}
		if id == "first" {
			proxy.CutConnections()
		}
	}
	close(last)
	proxy.CutConnections()
	running.Wait()
}
