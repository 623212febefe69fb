package memory

import (
	"context"
	"errors"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// publisher is the broker as the relay sees it.
type publisher struct {
	*inboxtest.Broker
	cfg Config
}

// Publish implements driver.Publisher. Messages are on their way side by side.
func (p publisher) Publish(ctx context.Context, m driver.Message, done func(error)) {
	go func() {
		err := p.cfg.Wire.Call(ctx, RabbitMQServer, StepPublish, func() error { return p.publish(ctx, m) })
		if _, classed := errors.AsType[*driver.PublishError](err); err != nil && !classed {
			err = &driver.PublishError{Class: driver.Unavailable, Err: err}
		}
		done(err)
	}()
}

func (p publisher) publish(ctx context.Context, m driver.Message) (err error) {
	p.Broker.Publish(ctx, m, func(e error) { err = e }) // it confirms before it returns
	if err != nil {
		return err
	}
	p.cfg.Flow.Note(flow.Published, m.Name)
	if p.cfg.Observe.Published != nil {
		p.cfg.Observe.Published(m.ID)
	}
	return nil
}

// fault is what the consumer meets at every step while RabbitMQ is off: nothing happens, and the session is lost.
func (s *Server) fault(inboxtest.Step, *inbox.Message) inboxtest.Outcome {
	if s.Off() {
		return inboxtest.FailBefore
	}
	return inboxtest.OK
}
