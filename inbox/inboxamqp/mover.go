package inboxamqp

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// copiesPause is how often a waiting message looks whether copies can be published again.
	copiesPause = 250 * time.Millisecond

	// inPlacePause bounds how long a message waits unsettled for which not even a retry queue is
	// left.
	inPlacePause = 5 * time.Second
)

// mover puts failed messages into other queues: a copy is confirmed there before the original is
// acknowledged.
type mover struct {
	cfg      *settings
	life     *lifetime
	copies   *copier
	refusals *refusals
	aside    aside
}

// copier publishes copies.
type copier struct {
	*amqpconn.Publisher
	work context.Context // not cancelled with the handlers: a message that failed in the drain is still moved
}

// publish puts a copy into a queue, without the sender's headers if it is too large with them. The
// publisher bounds the wait for the confirm.
func (c *copier) publish(queue string, copied amqp.Publishing) error {
	err := c.Confirmed(c.work, amqpconn.Out{Key: queue, Message: copied})
	if errors.Is(err, amqpconn.ErrInvalid) {
		err = c.Confirmed(c.work, amqpconn.Out{Key: queue, Message: withoutForeignHeaders(copied)})
	}
	return err
}

// transfer is a message on its way to another queue.
type transfer struct {
	d         *delivery
	queue     string
	copied    amqp.Publishing
	as        outcome
	confirmed func() // called before the original is acknowledged
}

// retry has a message come again as its next attempt. Confirmed is called before the original is
// acknowledged.
func (m *mover) retry(d *delivery, decision driver.Decision, now time.Time, confirmed func()) {
	m.delay(d, retryCopy(d.raw, d.msg, decision, now), decision.Delay, retried, confirmed)
}

// passOn has a message wait for the rest of its delay.
func (m *mover) passOn(d *delivery) { m.delay(d, duplicate(d.raw), d.wait, deferred, func() {}) }

// bury moves a message to the dead letters of its class.
func (m *mover) bury(d *delivery, letter inbox.DeadLetter, confirmed func()) {
	m.move(transfer{d, m.cfg.deadLetterQueue(letter.Class), deadCopy(d.raw, letter), dead, confirmed})
}

// delay moves a message to the retry queue that covers the delay, or the longest one.
func (m *mover) delay(d *delivery, copied amqp.Publishing, delay time.Duration, as outcome, confirmed func()) {
	step, rest := driver.Cover(m.cfg.Retry, delay)
	setWait(copied, rest)
	m.move(transfer{d, retryQueue(m.cfg.queue, step), copied, as, confirmed})
}

// move publishes a copy to a queue and then acknowledges the original.
func (m *mover) move(t transfer) { m.attend(t.d, func() { m.carry(t) }) }

// carry waits while no copy can be published at all, since the handler would have to run again
// for nothing, though not for so long that the broker takes the message back.
func (m *mover) carry(t transfer) {
	began := time.Now()
	stepAside := sync.OnceFunc(func() { m.stepAside(t.d) })
	for !t.d.ch.gone() { // else a copy would be a second one: the broker delivers the original again
		err := m.copies.publish(t.queue, t.copied)
		switch {
		case err == nil:
			m.refusals.clear(t.queue)
			t.confirmed()
			t.d.acknowledge(t.as)
			return
		case !waits(err):
			m.refused(t, err)
			return
		}
		stepAside()
		if time.Since(began) > m.cfg.brokerPatience/2 || !m.awaitCopies(t.d) {
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

// awaitCopies waits until copies can be published, or the session has ended. It is false when the
// run ends first.
func (m *mover) awaitCopies(d *delivery) bool {
	for runloop.Sleep(m.life.stop, copiesPause) == nil {
		if m.copies.Ready() == nil || d.ch.gone() {
			return true
		}
	}
	return false
}

// refused deals with a copy that its queue does not take: it is missing, full or closed to us.
func (m *mover) refused(t transfer, err error) {
	if m.refusals.note(t.queue, err, time.Now()) {
		m.cfg.Logger.Error("a queue takes no failed messages: they go behind the others", slog.String("to", t.queue), slog.Any("error", err))
	}
	m.later(t.d, m.refusals.pause(time.Now()), t.as == dead)
}

// later has a message come again after a pause, uncounted and behind the others. Given back to a
// classic queue it would come first again, and as many as fill the prefetch would stop the queue.
func (m *mover) later(d *delivery, pause time.Duration, byRetryQueue bool) {
	if byRetryQueue {
		copied := duplicate(d.raw)
		step, rest := driver.Cover(m.cfg.Retry, pause)
		setWait(copied, rest)
		if m.replace(d, retryQueue(m.cfg.queue, step), copied) {
			return
		}
	}
	m.stepAside(d)
	if runloop.Sleep(m.life.stop, min(pause, inPlacePause)) != nil || !m.replace(d, m.cfg.queue, duplicate(d.raw)) {
		d.giveBack()
	}
}

// replace puts a copy into a queue in place of the original. It is false when that was not
// possible.
func (m *mover) replace(d *delivery, queue string, copied amqp.Publishing) bool {
	switch {
	case d.ch.gone():
		d.leaveIt()
	case m.copies.publish(queue, copied) != nil:
		return false
	default:
		d.acknowledge(displaced)
	}
	return true
}

// attend has work done for a message and waits for it: until it steps aside, for a moment at most,
// or to its end when too many messages wait already.
func (m *mover) attend(d *delivery, work func()) {
	d.place = &place{bytes: len(d.raw.Body), free: make(chan struct{})}
	m.aside.attend(d.place, work)
}

// stepAside notes that a message is going to wait, which keeps its place in the prefetch, but no
// worker.
func (m *mover) stepAside(d *delivery) {
	if d.place != nil {
		m.aside.enter(d.place)
	}
	d.evidence.countWaiting(d.epoch)
}
