package browser_test

import (
	"context"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// gate stops a replay in its middle until it may go on, no longer than the test takes.
type gate struct {
	middle int
	open   chan struct{}
	goOn   func()
}

func newGate(t *testing.T, middle int) *gate {
	t.Helper()
	g := &gate{middle: middle, open: make(chan struct{})}
	g.goOn = sync.OnceFunc(func() { close(g.open) })
	t.Cleanup(g.goOn)
	return g
}

// pass is called when so many letters are done.
func (g *gate) pass(done int) {
	if done == g.middle {
		<-g.open
	}
}

// consumer is one of inboxtest or inboxamqp.
type consumer interface {
	operator.DeadLetterer
	Stats(context.Context) (inbox.Stats, error)
}

// gatedConsumer is a consumer whose replays pass a gate.
type gatedConsumer struct {
	consumer
	gate *gate
}

// DeadLetters are those of the consumer.
func (c gatedConsumer) DeadLetters() inbox.DeadLetters {
	return consumerLetters{c.consumer.DeadLetters(), c.gate}
}

type consumerLetters struct {
	inbox.DeadLetters
	gate *gate
}

func (l consumerLetters) Replay(ctx context.Context, f inbox.Filter, how inbox.Replay) (inbox.Replayed, error) {
	if tell := how.Progress; tell != nil {
		how.Progress = func(r inbox.Replayed) {
			tell(r)
			l.gate.pass(r.Returned)
		}
	}
	return l.DeadLetters.Replay(ctx, f, how)
}

// gatedOutbox is an outbox whose changes pass a gate.
type gatedOutbox struct {
	*outboxpgx.Store
	gate *gate
}

// DeadLetters are those of the outbox.
func (o gatedOutbox) DeadLetters() outbox.DeadLetters {
	return outboxLetters{o.Store.DeadLetters(), o.gate}
}

type outboxLetters struct {
	outbox.DeadLetters
	gate *gate
}

func (l outboxLetters) Replay(ctx context.Context, f outbox.Filter, how outbox.Replay) (outbox.Replayed, error) {
	if tell := how.Progress; tell != nil {
		how.Progress = func(r outbox.Replayed) {
			tell(r)
			l.gate.pass(r.Returned)
		}
	}
	return l.DeadLetters.Replay(ctx, f, how)
}

func (l outboxLetters) Remove(ctx context.Context, f outbox.Filter, how outbox.Removal) (int, error) {
	if tell := how.Progress; tell != nil {
		how.Progress = func(removed int) {
			tell(removed)
			l.gate.pass(removed)
		}
	}
	return l.DeadLetters.Remove(ctx, f, how)
}
