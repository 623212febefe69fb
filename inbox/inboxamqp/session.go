package inboxamqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

var (
	errCancelled = errors.New("the broker cancelled the consumer: the queue was deleted or moved")
	errPause     = errors.New("a server that processing needs is unavailable")
	errCrowded   = errors.New("failed messages that wait hold half of the prefetch")
	errStop      = errors.New("stop")
)

// session is one connection and channel. Deliveries know theirs, so that nothing of an
// old session can be settled on a new one.
type session struct {
	r    *run
	conn *amqpconn.Conn
	ch   *amqp.Channel
	tag  string // of the consumer, while there is one

	closes  <-chan *amqp.Error
	cancels <-chan string

	received bool // anything at all

	epoch   int64 // counts the times consuming began
	pauses  chan pauseRequest
	doubts  chan struct{} // tells that a message failed for want of a server
	trial   trial
	tags    tags
	over    atomic.Bool
	running atomic.Int64
	settled chan struct{} // tells a drain that running went down

	crowdMu sync.Mutex
	crowds  crowds
}

// pauseRequest comes from a delivery, and counts only in the epoch of that.
type pauseRequest struct {
	epoch int64
	why   error
}

func (s *session) requestPause(epoch int64, why error) {
	select {
	case s.pauses <- pauseRequest{epoch, why}:
	default: // there is one already
	}
}

// session receives messages until the session fails, or returns nil after a drain.
func (r *run) session(_ context.Context, conn *amqpconn.Conn) error {
	defer context.AfterFunc(r.finished, conn.Close)() // a drain that hangs
	opened := context.AfterFunc(r.stop, conn.Close)   // nothing is in hand yet
	ch, err := r.open(conn)
	if !opened() {
		return nil
	}
	if err != nil {
		return err
	}
	s := &session{
		r: r, conn: conn, ch: ch,
		closes:  ch.NotifyClose(make(chan *amqp.Error, 1)),
		cancels: ch.NotifyCancel(make(chan string, 1)),
		pauses:  make(chan pauseRequest, 1),
		doubts:  make(chan struct{}, 1),
		settled: make(chan struct{}, 1),
	}
	defer func() {
		s.over.Store(true)
		r.noteSilence(conn.Silent() && !s.received)
	}()
	defer r.c.setReady(errNoSession)
	for {
		err := s.consume()
		if errors.Is(err, errCrowded) {
			continue
		}
		if errors.Is(err, errPause) {
			r.c.setReady(fmt.Errorf("%w: %w", errPaused, err))
			err = s.pause(err)
		}
		s.trial.close()
		switch {
		case errors.Is(err, errStop):
			r.c.setReady(errDraining)
			return s.drain()
		case err != nil:
			return err
		}
	}
}

// consume hands deliveries to the workers until told to stop or to pause. It has then
// cancelled the consumer and given back what is not begun.
func (s *session) consume() error {
	if s.r.stop.Err() != nil {
		return errStop
	}
	s.epoch++
	s.trial.open(s.epoch)
	select {
	case <-s.pauses: // of an earlier epoch; it would keep a new one out
	default:
	}
	deliveries, err := s.subscribe(s.r.c.cfg.Prefetch)
	if err != nil {
		return err
	}
	s.r.c.setReady(nil)

	left, why := s.dispatch(deliveries)
	if errors.Is(why, errStop) || errors.Is(why, errCrowded) || errors.Is(why, errPause) {
		return cmp.Or(s.leave(deliveries, left), why)
	}
	for _, d := range left {
		d.leaveIt()
	}
	return why
}

// subscribe becomes a consumer of the queue, for so many unsettled messages at most. What an
// earlier consumer of this session was given does not count.
func (s *session) subscribe(prefetch int) (deliveries <-chan amqp.Delivery, err error) {
	// A tag of its own each time: older RabbitMQ, 3.10.8 among them, breaks the channel when a tag comes
	// again while messages that it was given are still unsettled (rabbitmq-server#5927).
	s.tag = s.r.c.cfg.Name + "-" + uuid.NewString()
	if err := s.conn.Within(func() error { return s.ch.Qos(prefetch, 0, false) }); err != nil {
		return nil, fmt.Errorf("set prefetch: %w", err)
	}
	if err := s.conn.Within(func() (err error) {
		deliveries, err = s.ch.Consume(s.r.c.cfg.queue, s.tag, false, false, false, false, nil)
		return err
	}); err != nil {
		return nil, fmt.Errorf("consume %q: %w", s.r.c.cfg.queue, err)
	}
	return deliveries, nil
}

// dispatch returns the deliveries no worker has taken yet, and why it ended. They gather
// while all workers are busy: what they can take together is a batch.
func (s *session) dispatch(deliveries <-chan amqp.Delivery) (left []*delivery, why error) {
	var overdue <-chan time.Time
	for {
		in, jobs := deliveries, s.r.jobs
		if len(left) == 0 {
			jobs = nil
		}
		if len(left) >= s.r.room() {
			in = nil
		}
		select {
		case raw, open := <-in:
			if !open {
				return left, s.cause()
			}
			left = append(left, s.accept(raw))
		case jobs <- left:
			s.r.count(left)
			left = nil
		case <-s.r.stop.Done():
			return left, errStop
		case request := <-s.pauses:
			if request.epoch == s.epoch || s.trial.waited() > 0 { // whose own request may have found no room
				return left, request.why
			}
		case <-s.doubts:
			if overdue == nil {
				overdue = time.After(controlPatience)
			}
		case <-overdue:
			overdue = nil
			if s.doubt() {
				return left, errPause
			}
			if waited := s.trial.waited(); waited > 0 { // the one that it began with has been judged
				overdue = time.After(max(controlPatience-waited, 0))
			}
		case _, open := <-s.cancels:
			if !open {
				return left, s.cause()
			}
			return left, errCancelled
		case err := <-s.closes:
			return left, closed(err)
		case <-s.conn.Done():
			return left, s.conn.Err()
		}
	}
}

// room is how many deliveries may be handed to a worker together.
func (r *run) room() int { return min(r.c.cfg.Batch, r.left()) }

// left is how many messages MessageLimit allows.
func (r *run) left() int {
	if limit := r.c.cfg.MessageLimit; limit > 0 {
		return limit - r.handed
	}
	return math.MaxInt
}

// count counts what was handed over towards MessageLimit. A message that only passes through
// on its way to a later retry does not count.
func (r *run) count(ds []*delivery) {
	for _, d := range ds {
		if d.wait == 0 {
			r.handed++
		}
	}
	if limit := r.c.cfg.MessageLimit; limit > 0 && r.handed >= limit {
		r.reached("MessageLimit")
	}
}

// leave cancels the consumer and then gives back what was delivered and not begun, left
// first: before, the broker would hand it out here once more.
func (s *session) leave(deliveries <-chan amqp.Delivery, left []*delivery) error {
	if err := s.conn.Within(func() error { return s.ch.Cancel(s.tag, false) }); err != nil {
		return fmt.Errorf("cancel consumer: %w", err)
	}
	for _, d := range left {
		d.giveBack()
	}
	for raw := range deliveries {
		s.accept(raw).giveBack()
	}
	return nil
}

// drain waits for the messages in hand. When the connection is lost meanwhile their
// handlers go on, and the broker delivers them again.
func (s *session) drain() error {
	for s.running.Load() > 0 {
		select {
		case <-s.settled:
		case <-s.conn.Done():
			return nil
		case <-s.r.abandoned:
			return nil
		}
	}
	// The acknowledgements are written; the answer to this shows that the broker has read them.
	_ = s.conn.Within(s.ch.Close)
	return nil
}

// cause tells why the delivery channel has ended. When the channel to the broker has, the
// client closes all listeners, that for a cancellation included.
func (s *session) cause() error {
	select {
	case _, cancelled := <-s.cancels:
		if cancelled {
			return errCancelled
		}
	default:
	}
	select {
	case err := <-s.closes:
		return closed(err)
	case <-s.conn.Done():
		return s.conn.Err()
	case <-time.After(time.Second):
		return amqp.ErrClosed
	}
}

func closed(err *amqp.Error) error {
	if err == nil {
		return amqp.ErrClosed
	}
	return fmt.Errorf("channel closed: %w", err)
}
