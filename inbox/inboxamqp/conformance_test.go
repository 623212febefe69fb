package inboxamqp_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The suites run whole on quorum queues. Of the others run the subtests that depend on the kind of queue.
func TestSource(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, cfg := range map[string]config{
		"quorum":          {},
		"classic":         {Classic: true},
		"ordered":         {Ordered: true},
		"ordered classic": {Ordered: true, Classic: true},
		"partitions":      {Ordered: true, Partitions: 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if cfg.Classic && cfg.Ordered || cfg.Partitions > 0 {
				testenv.Nightly(t, "its parts run with every change")
			}
			conformance.TestSource(t, conformance.SourceBackend{Runs: runsOf(name), New: func(t *testing.T) conformance.SourceFixture {
				f, _ := newSourceFixture(t, amqptest.New(t), cfg)
				return f
			}})
		})
	}
}

func runsOf(kind string) conformance.Runs {
	return conformance.Runs{Nightly: testenv.Nightly, Variant: kind != "quorum"}
}

func TestConsumer(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, cfg := range map[string]config{
		"quorum": {}, "classic": {Classic: true}, "ordered": {Ordered: true}, "partitions": {Ordered: true, Partitions: 3, Leveling: 300 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runs := runsOf(name)
			runs.Variant = cfg.Classic || cfg.Partitions > 0
			conformance.TestConsumer(t, conformance.ConsumerBackend{
				Runs: runs, Ordered: cfg.Ordered,
				New: func(t *testing.T) conformance.ConsumerFixture { return newConsumerFixture(t, amqptest.New(t), cfg) },
			})
		})
	}
}

func TestPartitions(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, classic := range map[string]bool{"classic": true, "quorum": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if !classic {
				testenv.Nightly(t, "classic queues are declared sooner")
			}
			cfg := config{Ordered: true, Classic: classic, Partitions: conformance.Partitions, Leveling: 300 * time.Millisecond}
			conformance.TestPartitions(t, conformance.PartitionsBackend{
				Runs: runsOf("partitions"),
				New:  func(t *testing.T) conformance.ConsumerFixture { return newConsumerFixture(t, amqptest.New(t), cfg) },
				Of: func(m *inbox.Message) string {
					if m.Key == "" {
						return "orders.0"
					}
					return fmt.Sprint("orders.", partition.Of(m.Key, "", partition.Slots)%conformance.Partitions)
				},
			})
		})
	}
}

func newConsumerFixture(t *testing.T, b *amqptest.Broker, base config) conformance.ConsumerFixture {
	t.Helper()
	sources, dial := newSourceFixture(t, b, base)
	return conformance.ConsumerFixture{
		SourceFixture: sources,
		Consumer: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) conformance.Consumer {
			c, err := inboxamqp.NewTuned(dial, "orders", p, inboxamqp.Config{ConsumerConfig: cfg.ConsumerConfig, Classic: base.Classic, Partitions: base.Partitions},
				inboxamqp.Tuning{MaxBodyBytes: cfg.MaxBodyBytes, Leveling: base.Leveling})
			must(t, err)
			setUp(t, c)
			return c
		},
	}
}

func newSourceFixture(t *testing.T, b *amqptest.Broker, cfg config) (f conformance.SourceFixture, dial func(context.Context) (*amqp.Connection, error)) {
	t.Helper()
	proxy := testenv.NewProxy(t, b.URL)
	cfg.Retry, cfg.Classes = quick, []string{conformance.OwnClass}
	direct := newConsumer(t, b.Dial, &recorder{}, cfg)
	setup := func() { setUp(t, direct) }
	setup()
	ch := b.Channel(t)
	must(t, ch.Confirm(false))
	dial = hasty(proxy.URL())
	exchange, key, queue := "", "orders", "orders"
	if cfg.Partitions > 1 {
		exchange, key, queue = "orders", "", "orders.0"
	}
	return conformance.SourceFixture{
		New: func(t *testing.T) driver.Source {
			return inboxamqp.SourceOf(newConsumer(t, dial, &recorder{}, cfg))
		},
		Letters: func(*testing.T) driver.Letters { return inboxamqp.LettersOf(direct) },
		Publish: func(t *testing.T, msgs ...*inbox.Message) {
			var last *amqp.DeferredConfirmation
			for _, m := range msgs {
				p := amqp.Publishing{
					MessageId: m.ID.String(), Type: m.Name, ContentType: m.ContentType, DeliveryMode: amqp.Persistent,
					Timestamp: m.PublishedAt, Headers: amqp.Table{}, Body: m.Body,
				}
				for name, value := range m.Headers {
					p.Headers[name] = value
				}
				if m.Key != "" {
					p.Headers["holdfast-key"], p.Headers["CC"] = m.Key, []any{partition.Slot(m.Key)}
				}
				var err error
				last, err = ch.PublishWithDeferredConfirm(exchange, key, true, false, p)
				must(t, err)
			}
			if ok, err := last.WaitContext(t.Context()); err != nil || !ok {
				t.Fatalf("not confirmed: %v", err)
			}
		},
		Network:   proxy,
		Forgetful: !cfg.Classic, // rabbitmq-server#10327
		Delete: func(t *testing.T) func() {
			must(t, deleteQueue(t, b, queue))
			return setup
		},
		Refuse: func(t *testing.T, class string) func() {
			must(t, deleteQueue(t, b, "failed."+class))
			return setup
		},
	}, dial
}
