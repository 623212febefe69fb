package memqueue_test

import (
	"sync/atomic"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// network breaks the calls of all sources of a queue.
type network struct {
	queue   *memqueue.Queue
	outcome atomic.Int64
}

func (n *network) CutConnections() { n.queue.Cut() }
func (n *network) Pause()          { n.outcome.Store(int64(memqueue.Hang)) }
func (n *network) DropReplies()    { n.outcome.Store(int64(memqueue.FailAfter)) }
func (n *network) Heal()           { n.outcome.Store(int64(memqueue.OK)) }

func (n *network) fault(_ memqueue.Step, _ *inbox.Message) memqueue.Outcome {
	return memqueue.Outcome(n.outcome.Load())
}

func TestSource(t *testing.T) {
	t.Parallel()
	for name, exclusive := range map[string]bool{"shared": false, "exclusive": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.TestSource(t, conformance.SourceBackend{Runs: conformance.Runs{Bubble: true}, New: func(*testing.T) conformance.SourceFixture {
				return fixture(exclusive)
			}})
		})
	}
}

func fixture(exclusive bool) conformance.SourceFixture {
	queue := memqueue.NewBroker().Queue("orders", conformance.OwnClass)
	n := &network{queue: queue}
	source := func(*testing.T) *memqueue.Source {
		return queue.Source(memqueue.Options{Exclusive: exclusive, Fault: n.fault})
	}
	return conformance.SourceFixture{
		New:     func(t *testing.T) driver.Source { return source(t) },
		Letters: func(t *testing.T) driver.Letters { return source(t).Letters() },
		Publish: func(t *testing.T, msgs ...*inbox.Message) {
			for _, m := range msgs {
				if err := queue.Put(m); err != nil {
					t.Fatal(err)
				}
			}
		},
		Network: n,
		Refuse: func(_ *testing.T, class string) func() {
			queue.Refuse(class, true)
			return func() { queue.Refuse(class, false) }
		},
		Delete: func(*testing.T) func() {
			queue.Delete()
			return queue.Declare
		},
	}
}
