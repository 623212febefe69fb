package memory

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// slowness is how long a slow consumer takes for a message.
const slowness = 2 * time.Second

// Demo breaks the shop on purpose and shows what becomes of it. It is safe for concurrent use.
type Demo struct {
	// Postgres, Redis and RabbitMQ are what the fakes stand for.
	Postgres, Redis, RabbitMQ *Server

	slow     atomic.Bool
	inHand   atomic.Int64 // messages that are being processed
	broker   *inboxtest.Broker
	outbox   *outboxtest.Store
	consumer *inboxtest.Consumer
}

// Servers lists them.
func (d *Demo) Servers() []*Server { return []*Server{d.Postgres, d.Redis, d.RabbitMQ} }

// SlowDown has the consumer take two seconds for a message, or no longer than it needs. It does not fail.
func (d *Demo) SlowDown(_ context.Context, on bool) error {
	d.slow.Store(on)
	return nil
}

// Slow tells whether the consumer is slow. It does not fail.
func (d *Demo) Slow(context.Context) (bool, error) { return d.slow.Load(), nil }

// maxDead is how many dead letters there may be before no more poison is sent: memory is all they have.
const maxDead = 1000

// Poison sends the consumer a message that no attempt can process.
func (d *Demo) Poison(ctx context.Context) error {
	if err := d.RabbitMQ.Ready(ctx); err != nil {
		return err
	}
	backlog, err := d.Backlog(ctx)
	if err != nil {
		return err
	}
	if n := *backlog.Queue + *backlog.Dead; n >= maxDead {
		return fmt.Errorf("memory: %d messages wait or are dead, which is enough", n)
	}
	m := messages.Poison()
	return d.broker.Send(ctx, &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: m.Name, Body: m.Body})
}

// Backlog looks at the outbox and the queue, whether they are switched off or not. Without an error it knows all.
func (d *Demo) Backlog(ctx context.Context) (flow.Backlog, error) {
	depth, err := d.outbox.Depth(ctx)
	if err != nil {
		return flow.Backlog{}, err
	}
	queue, err := d.consumer.Stats(ctx)
	if err != nil {
		return flow.Backlog{}, err
	}
	dead := depth.Dead
	for _, n := range queue.Dead {
		dead += n
	}
	inQueue := queue.Waiting + queue.Retrying + queue.PutOff + int(d.inHand.Load())
	return flow.Backlog{Outbox: new(depth.Ready + depth.Parked), Queue: &inQueue, Dead: &dead}, nil
}

// processor is the consumer's, watched and slowed down.
type processor struct {
	*inboxpgx.Store
	demo *Demo
	flow *flow.Tracker
}

// Process implements inbox.Processor. The wait is outside of the transaction, as that of a slow network would be.
func (p *processor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	p.demo.inHand.Add(int64(len(msgs)))
	defer p.demo.inHand.Add(-int64(len(msgs)))
	if p.demo.slow.Load() {
		select {
		case <-ctx.Done(): // the store gives the messages back
		case <-time.After(slowness):
		}
	}
	results := p.Store.Process(ctx, msgs)
	for i, err := range results {
		flow.NoteAttempt(p.flow, msgs[i].Name, msgs[i].Attempt, err)
	}
	return results
}
