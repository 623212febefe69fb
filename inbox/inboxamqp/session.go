package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/backoff"
)

// probes are the waits before a paused consumer tries one message: 0.5 s growing to 30 s, spread by half.
var probes = backoff.Policy{Base: 500 * time.Millisecond, Max: 30 * time.Second, Jitter: 0.5}

var (
	errCancelled = errors.New("the broker cancelled the consumer: the queue was deleted or moved")
	errPause     = errors.New("pause")
	errStop      = errors.New("stop")
)

// session is one connection and channel. Deliveries know theirs, so that nothing of an
// old session can be settled on a new one.
type session struct {
	r    *run
	conn *amqpconn.Conn
	ch   *amqp.Channel
	tag  string

	closes  <-chan *amqp.Error
	cancels <-chan string

	epoch   int64      // counts the times consuming began
	pauses  chan int64 // the epoch of a delivery that met an unavailable server
	over    atomic.Bool
	running atomic.Int64
	settled chan struct{} // tells a drain that running went down
}

// session receives messages until the session fails, or returns nil after a drain.
func (r *run) session(_ context.Context, conn *amqpconn.Conn) error {
	ch, err := conn.Channel()
	if err != nil {
		return fmt.Errorf("open channel: %w", err)
	}
	if err := conn.Within(func() error { return ch.Qos(r.c.cfg.Prefetch, 0, false) }); err != nil {
		return fmt.Errorf("set prefetch: %w", err)
	}
	s := &session{
		r: r, conn: conn, ch: ch, tag: r.c.cfg.Name + "-" + uuid.NewString(),
		closes:  ch.NotifyClose(make(chan *amqp.Error, 1)),
		cancels: ch.NotifyCancel(make(chan string, 1)),
		pauses:  make(chan int64, 1),
		settled: make(chan struct{}, 1),
	}
	defer s.over.Store(true)
	defer r.c.setReady(errNoSession)
	for {
		err := s.consume()
		if errors.Is(err, errPause) {
			r.c.setReady(errPaused)
			err = s.pause()
		}
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
	select {
	case <-s.pauses: // of an earlier epoch; it would keep a new one out
	default:
	}
	var deliveries <-chan amqp.Delivery
	if err := s.conn.Within(func() (err error) {
		deliveries, err = s.ch.Consume(s.r.c.cfg.Queue, s.tag, false, false, false, false, nil)
		return err
	}); err != nil {
		return fmt.Errorf("consume %q: %w", s.r.c.cfg.Queue, err)
	}
	s.r.c.setReady(nil)

	next, why := s.dispatch(deliveries)
	if next != nil {
		next.giveBack()
	}
	if errors.Is(why, errStop) || errors.Is(why, errPause) {
		if err := s.leave(deliveries); err != nil {
			return err
		}
	}
	return why
}

// dispatch returns the delivery no worker has taken yet, and why it ended.
func (s *session) dispatch(deliveries <-chan amqp.Delivery) (next *delivery, why error) {
	in := deliveries
	var jobs chan<- *delivery
	for {
		select {
		case raw, open := <-in:
			if !open {
				return nil, s.cause()
			}
			next, jobs, in = s.accept(raw), s.r.jobs, nil
		case jobs <- next:
			next, jobs, in = nil, nil, deliveries
			if s.r.limited() {
				in = nil
			}
		case <-s.r.stop.Done():
			return next, errStop
		case epoch := <-s.pauses:
			if epoch == s.epoch {
				return next, errPause
			}
		case _, open := <-s.cancels:
			if !open {
				return next, s.cause()
			}
			return next, errCancelled
		case err := <-s.closes:
			return next, closed(err)
		case <-s.conn.Done():
			return next, s.conn.Err()
		}
	}
}

// limited counts a message and reports whether it was the last one.
func (r *run) limited() bool {
	r.handed++
	limit := r.c.cfg.MessageLimit
	if limit == 0 || r.handed < limit {
		return false
	}
	r.reached("MessageLimit")
	return true
}

// leave cancels the consumer and gives back what was delivered and not begun.
func (s *session) leave(deliveries <-chan amqp.Delivery) error {
	if err := s.conn.Within(func() error { return s.ch.Cancel(s.tag, false) }); err != nil {
		return fmt.Errorf("cancel consumer: %w", err)
	}
	for raw := range deliveries {
		s.accept(raw).giveBack()
	}
	return nil
}

// pause waits and tries one message at a time until one can be processed.
func (s *session) pause() error {
	for n := 0; ; n++ {
		pause := probes.Delay(n, rand.Float64())
		s.r.c.cfg.Logger.Warn("paused: processing needs a server that is unavailable", slog.Duration("again_in", pause))
		timer := time.NewTimer(pause)
		err := s.wait(timer.C)
		timer.Stop()
		if err != nil {
			return err
		}
		if available, err := s.probe(); available || err != nil {
			return err
		}
	}
}

// probe has one message processed. With none in the queue, consuming goes on: the next
// message to arrive is the probe.
func (s *session) probe() (available bool, err error) {
	var raw amqp.Delivery
	var found bool
	if err := s.conn.Within(func() (err error) {
		raw, found, err = s.ch.Get(s.r.c.cfg.Queue, false)
		return err
	}); err != nil {
		return false, fmt.Errorf("get from %q: %w", s.r.c.cfg.Queue, err)
	}
	if !found {
		return true, nil
	}
	d := s.accept(raw)
	d.probe = make(chan bool, 1)
	select {
	case s.r.jobs <- d:
		s.r.limited()
	case <-s.r.stop.Done():
		d.giveBack()
		return false, errStop
	case err := <-s.closes:
		return false, closed(err)
	case <-s.conn.Done():
		return false, s.conn.Err()
	}
	select {
	case available = <-d.probe:
		return available, nil
	case <-s.r.stop.Done():
		return false, errStop
	case err := <-s.closes:
		return false, closed(err)
	case <-s.conn.Done():
		return false, s.conn.Err()
	}
}

// wait returns nil once done, or the reason why there is nothing left to wait for.
func (s *session) wait(done <-chan time.Time) error {
	select {
	case <-done:
		return nil
	case <-s.r.stop.Done():
		return errStop
	case err := <-s.closes:
		return closed(err)
	case <-s.conn.Done():
		return s.conn.Err()
	}
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
