package memory

import (
	"context"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// publisher is the broker as the relay sees it.
type publisher struct {
	*inboxtest.Broker
	rabbitMQ *Server
	flow     *flow.Tracker
}

// Publish implements driver.Publisher.
func (p publisher) Publish(ctx context.Context, m driver.Message, done func(error)) {
	if err := p.rabbitMQ.Ready(ctx); err != nil {
		done(&driver.PublishError{Class: driver.Unavailable, Err: err})
		return
	}
	p.Broker.Publish(ctx, m, func(err error) {
		if err == nil {
			p.flow.Note(flow.Published, m.Name)
		}
		done(err)
	})
}

// fault is what the consumer meets at every step while RabbitMQ is off: nothing happens, and the session is lost.
func (s *Server) fault(inboxtest.Step, *inbox.Message) inboxtest.Outcome {
	if s.Off() {
		return inboxtest.FailBefore
	}
	return inboxtest.OK
}
