package inboxtest_test

import (
	"cmp"
	"sync/atomic"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

func TestConsumer(t *testing.T) {
	t.Parallel()
	for name, ordered := range map[string]bool{"shared": false, "ordered": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.TestConsumer(t, conformance.ConsumerBackend{
				Runs: conformance.Runs{Bubble: true}, Ordered: ordered, New: func(*testing.T) conformance.ConsumerFixture { return newFixture(ordered) },
			})
		})
	}
}

// network breaks the calls of all consumers of one queue only.
type network struct {
	queue   *memqueue.Queue
	outcome atomic.Int64
}

func (n *network) CutConnections() { n.queue.Cut() }
func (n *network) Pause()          { n.outcome.Store(int64(inboxtest.Hang)) }
func (n *network) DropReplies()    { n.outcome.Store(int64(inboxtest.FailAfter)) }
func (n *network) Heal()           { n.outcome.Store(int64(inboxtest.OK)) }

func newFixture(ordered bool) conformance.ConsumerFixture {
	broker := inboxtest.NewBroker()
	queue := broker.Queue("orders", conformance.OwnClass)
	source := func(*testing.T) driver.Source { return queue.Source(memqueue.Options{Exclusive: ordered}) }
	n := &network{queue: queue}
	return conformance.ConsumerFixture{
		SourceFixture: conformance.SourceFixture{
			New:         source,
			DeadLetters: func(*testing.T) driver.DeadLetters { return queue.Source(memqueue.Options{}).DeadLetters() },
			Publish: func(t *testing.T, msgs ...*inbox.Message) {
				for _, m := range msgs {
					noError(t, queue.Put(m))
				}
			},
			Network: n,
			Delete: func(*testing.T) func() {
				queue.Delete()
				return queue.Declare
			},
			Refuse: func(_ *testing.T, class string) func() {
				queue.Refuse(class, true)
				return func() { queue.Refuse(class, false) }
			},
		},
		Consumer: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) conformance.Consumer {
			cfg.Name = cmp.Or(cfg.Name, "suite")
			c, err := inboxtest.NewConsumerOf(broker, "orders", p, inboxtest.Config{
				ConsumerConfig: cfg.ConsumerConfig,
				Fault:          func(inboxtest.Step, *inbox.Message) inboxtest.Outcome { return inboxtest.Outcome(n.outcome.Load()) },
			}, cfg.MaxBodyBytes)
			noError(t, err)
			return c
		},
	}
}
