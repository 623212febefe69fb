package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// session is one channel, on a connection of its own. It is thrown away when anything about it
// breaks, and a delivery knows its session, so nothing is settled on a later one.
type session struct {
	src    *source
	conn   *amqpconn.Conn
	ch     *amqp.Channel
	intake intake
	notes  *notes

	received atomic.Bool // anything at all

	tags    tags
	passing atomic.Int64  // messages in hand that only pass through
	most    atomic.Int64  // how many of them may wait
	crowded chan struct{} // tells the receiver that there are more

	mostLate atomic.Int64 // how many acknowledgements may wait for earlier messages; the receiver sets it

	mu    sync.Mutex // held while something is settled
	over  bool
	looks bool // a look at the acknowledgements that wait is due
}

// ackPatience is the time between two looks at the acknowledgements that wait for earlier messages. Those that have
// waited since the look before are written. So none waits for more than twice this time.
const ackPatience = 100 * time.Millisecond

// delivery is one hand-out of a message.
type delivery struct {
	session *session
	raw     amqp.Delivery
	read    sync.Once
	msg     *inbox.Message
	wait    time.Duration // what remains of a long delay; the message only passes through
}

// Message implements driver.Delivery.
func (d *delivery) Message() *inbox.Message {
	d.read.Do(func() { d.msg = arrived(d.raw, d.session.src.queue, d.session.src.cfg.symfony) })
	return d.msg
}

// Slow implements driver.SlowDelivery.
func (d *delivery) Slow() bool { return d.session.src.cfg.symfony.Slow(d.raw.Body, contentType(d.raw)) }

func newSession(src *source, conn *amqpconn.Conn, ch *amqp.Channel) *session {
	s := &session{src: src, conn: conn, ch: ch, crowded: make(chan struct{}, 1), notes: newNotes(conn)}
	s.intake = intake{
		session: s, src: src, conn: conn, ch: ch,
		closes:  ch.NotifyClose(make(chan *amqp.Error, 1)),
		cancels: ch.NotifyCancel(make(chan string, 1)),
	}
	return s
}

// Start implements driver.Session. What an earlier consumer of this channel was given does not count
// towards the window.
func (s *session) Start(ctx context.Context, window int) error {
	defer bound(ctx, s.conn)()
	if err := s.intake.unsubscribe(); err != nil {
		return err
	}
	s.intake.renewals, s.intake.stopped = 0, false
	return s.intake.subscribe(window)
}

// Receive implements driver.Session.
func (s *session) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	for len(s.intake.kept) == 0 || s.intake.stopped {
		if err := s.intake.await(ctx); err != nil {
			return nil, err
		}
	}
	s.intake.gather(most)
	return s.intake.take(most), nil
}

// Stop implements driver.Session. An ordered consumer stays one, and what has arrived stays unsettled
// until the next Start or Close: cancelled, a quorum queue with a single active consumer would call in
// the next one, and take back out of order what is on its way.
func (s *session) Stop(ctx context.Context) error {
	s.intake.stopped = true
	if s.src.cfg.Ordered {
		return nil
	}
	defer bound(ctx, s.conn)()
	if err := s.intake.unsubscribe(); err != nil {
		return err
	}
	kept := s.intake.take(len(s.intake.kept))
	if len(kept) == 0 {
		return nil
	}
	return s.GiveBack(ctx, kept)
}

// Ack implements driver.Session, with as few writes as is safe.
func (s *session) Ack(_ context.Context, ds []driver.Delivery, mayWait bool) error {
	most := 0
	if mayWait {
		most = int(s.mostLate.Load())
	}
	return s.settle(ds, func(tags []uint64) error {
		waits, err := s.tags.acknowledge(tags, most, s.ch.Ack)
		if waits && !s.looks {
			s.looks = true
			time.AfterFunc(ackPatience, s.hasten)
		}
		return err
	})
}

// hasten writes the acknowledgements that have waited for too long. A write that fails ends the session.
func (s *session) hasten() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looks = false
	if s.over {
		return
	}
	_ = s.conn.Within(func() (err error) {
		s.looks, err = s.tags.hasten(s.ch.Ack)
		return err
	})
	if s.looks {
		time.AfterFunc(ackPatience, s.hasten)
	}
}

// GiveBack implements driver.Session.
func (s *session) GiveBack(_ context.Context, ds []driver.Delivery) error {
	return s.settle(ds, func(tags []uint64) (err error) {
		for _, tag := range tags {
			err = errors.Join(err, s.ch.Nack(tag, false, true), s.tags.settle(tag, s.ch.Ack))
		}
		return err
	})
}

// settle writes what becomes of deliveries of this session. It fails as a whole once the session has
// ended, and a write that fails has no effect: the broker delivers all of them again.
func (s *session) settle(ds []driver.Delivery, write func(tags []uint64) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	tags := make([]uint64, 0, len(ds))
	for _, d := range ds {
		if own, ok := d.(*delivery); ok && own.session == s {
			tags = append(tags, own.raw.DeliveryTag)
		}
	}
	if s.over {
		return driver.ErrStale
	}
	if err := s.conn.Within(func() error { return write(tags) }); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrStale, err)
	}
	if len(tags) < len(ds) {
		return fmt.Errorf("%w: %d of %d messages", driver.ErrStale, len(ds)-len(tags), len(ds))
	}
	return nil
}

// gone reports whether the broker delivers again what is not settled.
func (s *session) gone() bool {
	select {
	case <-s.conn.Done():
		return true
	default:
		return s.ch.IsClosed()
	}
}

// Close implements driver.Session: it closes the channel without cancelling the consumer. A quorum
// queue then takes back what is unsettled in one step and in its order, before another consumer gets
// anything; a cancelled one would let the next consumer begin before.
func (s *session) Close(ctx context.Context) error {
	defer bound(ctx, s.conn)()
	s.notes.end()
	defer s.notes.done.Wait()
	s.mu.Lock()
	if !s.over && !s.gone() {
		_ = s.conn.Within(func() error { return s.tags.flush(s.ch.Ack) }) // without it they come again
	}
	s.over = true
	s.mu.Unlock()
	// The answer shows that the broker has read the acknowledgements.
	err := s.conn.Within(s.ch.Close)
	s.conn.Close()
	s.src.silence.note(s.conn.Silent() && !s.received.Load())
	return err
}
