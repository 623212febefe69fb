package inboxamqp

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// keepPause is how long a message is held that could not be moved, or that was given back
// for no reason the consumer knows: neither must make a hot loop.
const keepPause = time.Second

// misplaced are the pauses while queues do not take their copies: 1 s growing to 30 s.
var misplaced = backoff.Policy{Base: keepPause, Max: 30 * time.Second, Jitter: 0.2}

// move publishes a copy to a queue, calls confirmed, and then acknowledges the original.
// While no copy can be published at all, the message waits here, since its handler would
// have to run again for nothing. When the queue does not take it, it is given back later.
func (r *run) move(d *delivery, queue string, copied amqp.Publishing, as outcome, confirmed func()) {
	for !d.s.gone() { // else a copy would be a second one: the broker delivers the original again
		err := r.publish(queue, copied)
		if err == nil {
			r.refusals.Store(0)
			confirmed()
			d.acknowledge(as)
			return
		}
		r.c.cfg.Logger.Error("message not moved", slog.Any("message_id", d.msg.ID), slog.String("to", queue), slog.Any("error", err))
		if !errors.Is(err, amqpconn.ErrUnavailable) && !errors.Is(err, amqpconn.ErrBlocked) {
			// The pause grows until a queue takes something: a consumer without its
			// retry queues must not run the same handlers every second.
			r.park(d, misplaced.Delay(int(r.refusals.Add(1))-1, rand.Float64()))
			return
		}
		if runloop.Sleep(r.stop, keepPause) != nil {
			d.giveBack()
			return
		}
	}
	d.leaveIt()
}

// park gives a message back after a pause, or when the run ends. It needs no worker
// meanwhile, only its place in the prefetch.
func (r *run) park(d *delivery, pause time.Duration) {
	go func() {
		_ = runloop.Sleep(r.stop, pause) // a drain does not wait
		d.giveBack()
	}()
}

func (r *run) publish(queue string, copied amqp.Publishing) error {
	// Not the handlers' context: a message that failed in the drain is still moved. The
	// publisher bounds the wait.
	ctx := context.WithoutCancel(r.work)
	err := r.copies.Confirmed(ctx, amqpconn.Out{Key: queue, Message: copied})
	if errors.Is(err, amqpconn.ErrInvalid) {
		err = r.copies.Confirmed(ctx, amqpconn.Out{Key: queue, Message: withoutForeignHeaders(copied)})
	}
	return err
}

// deadLetterQueue is the queue of a class that has one, else that of the default class.
func (r *run) deadLetterQueue(class string) string {
	if !slices.Contains(allClasses(r.c.cfg.Classes), class) {
		class = inbox.ClassDefault
	}
	return inbox.DeadLetterQueue(r.c.cfg.DeadLetterPrefix, class)
}
