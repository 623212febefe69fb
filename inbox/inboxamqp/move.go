package inboxamqp

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// copiesPause is how often a waiting message looks whether copies can be published again.
	copiesPause = 250 * time.Millisecond

	// inPlacePause bounds how long a message waits unsettled for which not even a retry queue is left.
	inPlacePause = 5 * time.Second
)

// transfer is a message on its way to another queue.
type transfer struct {
	d         *delivery
	queue     string
	copied    amqp.Publishing
	as        outcome
	confirmed func() // called before the original is acknowledged
}

// move publishes a copy to a queue and then acknowledges the original.
func (r *run) move(t transfer) { r.attend(t.d, func() { r.carry(t) }) }

// carry waits while no copy can be published at all, since the handler would have to run again
// for nothing, though not for so long that the broker takes the message back.
func (r *run) carry(t transfer) {
	began := time.Now()
	stepAside := sync.OnceFunc(func() { r.stepAside(t.d) })
	for !t.d.s.gone() { // else a copy would be a second one: the broker delivers the original again
		err := r.publish(t.queue, t.copied)
		switch {
		case err == nil:
			r.refusals.clear(t.queue)
			t.confirmed()
			t.d.acknowledge(t.as)
			return
		case !waits(err):
			r.refused(t, err)
			return
		}
		stepAside()
		if time.Since(began) > r.c.cfg.brokerPatience/2 || !r.awaitCopies(t.d) {
			t.d.giveBack()
			return
		}
	}
	t.d.leaveIt()
}

// waits reports whether the fault is one of the connection, and not of the queue or the copy.
func waits(err error) bool {
	return errors.Is(err, amqpconn.ErrUnavailable) || errors.Is(err, amqpconn.ErrBlocked)
}

// awaitCopies waits until copies can be published, or the session has ended. It is false when the run ends first.
func (r *run) awaitCopies(d *delivery) bool {
	for runloop.Sleep(r.stop, copiesPause) == nil {
		if r.copies.Ready() == nil || d.s.gone() {
			return true
		}
	}
	return false
}

// refused deals with a copy that its queue does not take: it is missing, full or closed to us.
func (r *run) refused(t transfer, err error) {
	if r.refusals.note(t.queue, err, time.Now()) {
		r.c.cfg.Logger.Error("a queue takes no failed messages: they go behind the others", slog.String("to", t.queue), slog.Any("error", err))
	}
	r.later(t.d, r.refusals.pause(time.Now()), t.as == dead)
}

// later has a message come again after a pause, uncounted and behind the others. Given back to a
// classic queue it would come first again, and as many as fill the prefetch would stop the queue.
func (r *run) later(d *delivery, pause time.Duration, byRetryQueue bool) {
	if byRetryQueue {
		copied := duplicate(d.raw)
		step, rest := driver.Cover(r.c.cfg.Retry, pause)
		setWait(copied, rest)
		if r.replace(d, retryQueue(r.c.cfg.queue, step), copied) {
			return
		}
	}
	r.stepAside(d)
	if runloop.Sleep(r.stop, min(pause, inPlacePause)) != nil || !r.replace(d, r.c.cfg.queue, duplicate(d.raw)) {
		d.giveBack()
	}
}

// replace puts a copy into a queue in place of the original. It is false when that was not possible.
func (r *run) replace(d *delivery, queue string, copied amqp.Publishing) bool {
	switch {
	case d.s.gone():
		d.leaveIt()
	case r.publish(queue, copied) != nil:
		return false
	default:
		d.acknowledge(displaced)
	}
	return true
}

// publish puts a copy into a queue, without the sender's headers if it is too large with them.
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
