package faults_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	// backWithin is how long after the end of a fault a consumer on a calm machine is ready and has caught up.
	backWithin    = 10 * time.Second
	recoveryQueue = "recovery"
)

// However long a fault has lasted, and whatever pauses have grown meanwhile, the consumer is back soon
// after its end.
func TestInboxIsBackSoon(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, fault := range map[string]struct {
		begin func(r *comeback)
		end   func(r *comeback)
	}{
		"broker cut off": {func(r *comeback) { r.proxy.Cut() }, func(r *comeback) { r.proxy.Heal() }},
		"broker silent":  {func(r *comeback) { r.proxy.Pause() }, func(r *comeback) { r.proxy.Resume() }},
		"connections silent": {
			func(r *comeback) { r.proxy.SilenceConnections() },
			func(r *comeback) { r.proxy.Heal() },
		},
		"database down":  {func(r *comeback) { r.fail.Store(&unavailable) }, func(r *comeback) { r.fail.Store(nil) }},
		"most fail":      {func(r *comeback) { r.fail.Store(&broken) }, func(r *comeback) { r.fail.Store(nil) }},
		"queues missing": {func(r *comeback) { r.deleteQueues() }, func(r *comeback) { must(r.t, r.setup()) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newComeback(t)
			r.send(20)
			untilTrue(t, "the first messages are processed", r.caughtUp)
			fault.begin(r)
			r.send(20)
			time.Sleep(time.Duration(scaled(t, 10)) * 800 * time.Millisecond)
			fault.end(r)
			began := time.Now()
			untilTrue(t, "the consumer is ready and has caught up", func() bool {
				if r.ready() != nil {
					return false
				}
				r.send(1)
				return r.caughtUp()
			})
			took := time.Since(began)
			t.Logf("%-20s back after %4.1f s", name, took.Seconds())
			if long(t) && took > backWithin { // a short run shares its processors
				t.Errorf("back after %v", took)
			}
		})
	}
}

var (
	unavailable = inbox.Unavailable(errors.New("down"))
	broken      = inbox.Recoverable(errors.New("down"))
)

// comeback is a consumer behind a proxy, whose handler can fail.
type comeback struct {
	t     *testing.T
	b     *amqptest.Broker
	proxy *testenv.Proxy
	ready func() error
	setup func() error

	fail       atomic.Pointer[error]
	sent, done atomic.Int64
}

func newComeback(t *testing.T) *comeback {
	t.Helper()
	b := amqptest.New(t)
	r := &comeback{t: t, b: b, proxy: testenv.NewProxy(t, b.URL)}
	mux := inbox.NewMux()
	must(t, inbox.Handle(mux, "good", func(context.Context, struct{}) error {
		if err := r.fail.Load(); err != nil {
			return *err
		}
		r.done.Add(1)
		return nil
	}))
	cfg := inboxamqp.Config{Classic: true, ConsumerConfig: inbox.ConsumerConfig{
		Logger: quiet, Retry: inbox.RetryPolicy{BaseDelay: 500 * time.Millisecond, MaxDelay: time.Second},
	}}
	direct, err := inboxamqp.NewConsumer(func(context.Context) (*amqp.Connection, error) { return amqp.Dial(b.URL) }, recoveryQueue, mux, cfg)
	must(t, err)
	r.setup = func() error { return direct.Setup(t.Context()) }
	must(t, r.setup())
	c, err := inboxamqp.NewConsumer(func(context.Context) (*amqp.Connection, error) { return amqp.Dial(r.proxy.URL()) }, recoveryQueue, mux, cfg)
	must(t, err)
	r.ready = func() error { return c.Ready(t.Context()) }
	beside(t, c.Run)
	untilTrue(t, "the consumer is at work", func() bool { return r.ready() == nil })
	return r
}

func (r *comeback) send(n int) {
	r.t.Helper()
	for range n {
		err := ledger.OnBroker(r.t.Context(), r.b.URL, func(ch *amqp.Channel) error {
			return ch.Publish("", recoveryQueue, false, false, amqp.Publishing{
				MessageId: ids.New().String(), Type: "good", DeliveryMode: amqp.Persistent, Body: []byte("{}"),
			})
		})
		must(r.t, err)
		r.sent.Add(1)
	}
}

func (r *comeback) caughtUp() bool { return r.done.Load() >= r.sent.Load() }

// deleteQueues takes the messages along that are there.
func (r *comeback) deleteQueues() {
	must(r.t, ledger.OnBroker(r.t.Context(), r.b.URL, func(ch *amqp.Channel) error {
		_, err := ch.QueueDelete(recoveryQueue, false, false, false)
		return err
	}))
	r.sent.Add(-20) // those that are sent now reach no queue
}
