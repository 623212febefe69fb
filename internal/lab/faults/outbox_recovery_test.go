package faults_test

import (
	"errors"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// Relay and publisher as they are by default are back soon after an outage of their broker that lasted
// long enough for every pause to grow: the promise is 10 s, and a busy machine has three times that, and three tries.
func TestOutboxRecoversFromItsBroker(t *testing.T) {
	t.Parallel()
	const outage, most = 15 * time.Second, 30 * time.Second
	server := testenv.Private(t, testenv.RabbitMQ)
	must(t, ledger.OnBroker(t.Context(), server.URL(), declare))
	s := newStore(t, pgtest.URL(t))
	f := newFlow(t, s)
	proxy := testenv.NewProxy(t, server.URL())
	publisher, err := outboxamqp.NewPublisher(outboxamqp.Dial(proxy.URL(), amqp.Config{}), outboxamqp.Config{Logger: quiet})
	must(t, err)
	messages, err := outboxpgx.New(s.pool, outboxpgx.Config{Logger: quiet})
	must(t, err)
	relay, err := outbox.NewRelay(messages, publisher, outbox.RelayConfig{Logger: quiet})
	must(t, err)
	stopRelay := beside(t, relay.Run)
	ready := func() error {
		return errors.Join(publisher.Ready(t.Context()), relay.Ready(t.Context()))
	}
	testenv.Eventually(t, ready)

	for _, fault := range []struct {
		name     string
		do, heal func()
	}{
		{"connections silent", proxy.SilenceConnections, func() {}},
		{"network cut", proxy.Cut, proxy.Heal},
		{"network silent", proxy.Pause, proxy.Heal},
		{"killed", func() { must(t, server.Kill()) }, func() { must(t, server.Start(t.Context())) }},
	} {
		testenv.InTime(t, most, func() time.Duration {
			stop := beside(t, f.run)
			f.enter("before " + fault.name)
			time.Sleep(time.Second)
			fault.do()
			f.enter(fault.name)
			time.Sleep(outage)
			stop()
			fault.heal()
			began := time.Now()
			stopConsuming := beside(t, f.consume(server.URL(), queue))
			f.untilAllArrived(t)
			testenv.Eventually(t, ready)
			took := time.Since(began)
			stopConsuming()
			t.Logf("%-20s %5.1f s", fault.name, took.Seconds())
			return took
		})
	}
	stopRelay()
	if n := s.count(`SELECT count(*) FROM holdfast_outbox_dead`); n > 0 {
		t.Errorf("outages cost %d messages their attempts", n)
	}
}
