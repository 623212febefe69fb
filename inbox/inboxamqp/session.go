package inboxamqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// Faults.
//
// The consumer asks the broker every two seconds whether it is there, and connects anew when it
// has not answered for five, or for one and a half heartbeats if that is less. The broker, too, must
// notice a connection that fell silent before it delivers again what that was given: after two to
// three heartbeats. They are in the amqp.Config of the dial function, 10 s by default.
//
// On a lost connection, a closed channel, a deleted queue or a restarted broker the consumer
// begins a new session, after pauses that grow to 2 seconds. The log and Ready name a queue that
// does not exist: Run declares nothing, and goes on as soon as Setup has declared it again. RabbitMQ
// 3.10 confirms the declaration of a quorum queue before it is on the disk. Killed right then, it
// comes back with a queue that takes no messages; delete it and call Setup.
//
// An error of inbox.Unavailable, for a database that is down, keeps the message. When another one
// that began later goes through, the server is there: the message goes behind the others for about
// two seconds, and the second time has failed by itself, so that its failure is counted as any
// other. When 16 messages have failed, or as many as Prefetch, or one has waited for 5 seconds for
// another that runs, the consumer pauses: it cancels itself at the broker and tries a few messages
// at a time, at distances up to about 2 seconds, until one goes through. It tries messages that
// have not failed yet first, and more where those run for over 2 seconds. Where no other begins for
// 1.5 seconds, those that failed are tried again, and it pauses when they fail.

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

var errCancelled = errors.New("the broker cancelled the consumer: the queue was deleted or moved")

func closed(err *amqp.Error) error {
	if err == nil {
		return amqp.ErrClosed
	}
	return fmt.Errorf("channel closed: %w", err)
}

// intake is what a session receives by. It belongs to the goroutine that does.
type intake struct {
	session *session
	src     *source
	conn    *amqpconn.Conn
	ch      *amqp.Channel
	closes  <-chan *amqp.Error
	cancels <-chan string

	tag        string               // of the consumer; "" while there is none
	window     int                  // of the consumer
	renewals   int                  // of the consumer, since Start
	deliveries <-chan amqp.Delivery // nil while there is no consumer
	stopped    bool                 // nothing is to be returned
	kept       []driver.Delivery    // received, and not returned yet
}

func (i *intake) subscribe(window int) error {
	if err := i.conn.Within(func() error { return i.ch.Qos(window, 0, false) }); err != nil {
		return fmt.Errorf("set prefetch: %w", err)
	}
	// A tag of its own each time: older RabbitMQ, 3.10.8 among them, breaks the channel when a tag
	// comes again while messages that it was given are still unsettled (rabbitmq-server#5927).
	tag := i.src.cfg.ConsumerConfig.Name + "-" + uuid.NewString()
	var deliveries <-chan amqp.Delivery
	err := i.conn.Within(func() (err error) {
		deliveries, err = i.ch.Consume(i.src.queue, tag, false, false, false, false, nil)
		return err
	})
	if amqpconn.IsNotFound(err) {
		return i.src.missing()
	}
	if err != nil {
		return fmt.Errorf("consume %q: %w", i.src.queue, err)
	}
	i.tag, i.window, i.deliveries = tag, window, deliveries
	i.session.most.Store(i.session.passing.Load() + int64(window+1)/2)
	i.session.mostLate.Store(int64(window) / 4) // each of them keeps a place of the window
	return nil
}

// await waits for one message.
func (i *intake) await(ctx context.Context) error {
	deliveries := i.deliveries
	if i.stopped {
		deliveries = nil
	}
	select {
	case raw, open := <-deliveries:
		if !open {
			return i.cause()
		}
		i.accept(raw)
		return nil
	case <-i.session.crowded:
		return i.renew()
	case _, open := <-i.cancels:
		if !open {
			return i.cause()
		}
		return errCancelled
	case err := <-i.closes:
		return closed(err)
	case <-i.conn.Done():
		return i.conn.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// gather takes what is there. The client passes messages on one by one, each as soon as the one
// before is taken: it needs a turn of the scheduler for that.
func (i *intake) gather(most int) {
	for yielded := false; len(i.kept) < most; {
		select {
		case raw, open := <-i.deliveries:
			if !open {
				return
			}
			i.accept(raw)
			yielded = false
		default:
			if yielded {
				return
			}
			runtime.Gosched()
			yielded = true
		}
	}
}

// accept keeps a message that has arrived for Receive, unless it only passes through.
func (i *intake) accept(raw amqp.Delivery) {
	i.session.received.Store(true)
	i.session.tags.add(raw.DeliveryTag)
	i.src.silence.received(len(raw.Body))
	if queue := i.src.cfg.noteOf(raw); queue != "" {
		i.session.notes.take(queue)
	}
	d := &delivery{session: i.session, raw: raw, wait: waitHeader(raw, i.src.cfg.Retry.MaxAge)}
	if d.wait > 0 {
		i.session.passing.Add(1)
		i.src.passing.add(d)
		return
	}
	i.kept = append(i.kept, d)
}

// cause tells why the delivery channel has ended. When the channel to the broker has, the
// client closes all listeners, that for a cancellation included.
func (i *intake) cause() error {
	select {
	case _, cancelled := <-i.cancels:
		if cancelled {
			return errCancelled
		}
	default:
	}
	select {
	case err := <-i.closes:
		return closed(err)
	case <-i.conn.Done():
		return i.conn.Err()
	case <-time.After(time.Second):
		return amqp.ErrClosed
	}
}

// unsubscribe is a consumer no more, and keeps what was on its way.
func (i *intake) unsubscribe() error {
	if i.deliveries == nil {
		return nil
	}
	if err := i.conn.Within(func() error { return i.ch.Cancel(i.tag, false) }); err != nil {
		return fmt.Errorf("cancel consumer: %w", err)
	}
	for raw := range i.deliveries { // ends, since the client has what was sent before the answer
		i.accept(raw)
	}
	i.deliveries = nil
	return nil
}

// renew consumes anew: the new consumer has a whole window, so that messages that pass through and
// cannot, under an alarm of the broker for example, do not keep the others out. Where one consumer at a
// time is served that would call in the next.
func (i *intake) renew() error {
	if i.stopped || i.renewals == maxRenewals || i.src.cfg.Ordered {
		return nil
	}
	i.renewals++
	if err := i.unsubscribe(); err != nil {
		return err
	}
	return i.subscribe(i.window)
}

// take returns what is kept, at most so many.
func (i *intake) take(most int) []driver.Delivery {
	n := min(most, len(i.kept))
	ds := i.kept[:n:n]
	if i.kept = i.kept[n:]; len(i.kept) == 0 {
		i.kept = nil
	}
	return ds
}

// tags knows which deliveries of a channel are settled, so that one acknowledgement can
// cover several: the broker takes "multiple" for all tags up to it, those still in work
// included, so it may be used on a settled prefix only. What workers finish beyond the prefix
// may wait for a short time until the prefix has grown: an acknowledgement for each costs the broker
// as much as the message did.
type tags struct {
	mu      sync.Mutex
	first   uint64   // the lowest tag in work; those before it are gone
	ended   []bool   // from first on: done or settled otherwise
	waiting []uint64 // done, and the broker does not know yet
	late    int      // so many of waiting, from its begin, waited at the last look
}

// add notes a delivery. Tags begin at 1 and have no gaps; if there ever were one, nothing
// beyond it would be acknowledged together.
func (t *tags) add(tag uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.first = max(t.first, 1)
	for t.first+uint64(len(t.ended)) <= tag {
		t.ended = append(t.ended, false)
	}
}

// acker writes an acknowledgement.
type acker func(tag uint64, multiple bool) error

// settle notes that a delivery was settled by itself. Those behind it may have waited for it.
func (t *tags) settle(tag uint64, ack acker) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end(tag)
	return t.prefix(ack)
}

// acknowledge notes deliveries as done and writes one acknowledgement for all in the settled prefix.
// The others wait; if there are more than most, each gets one of its own. It holds the lock meanwhile,
// so that no later prefix is written first. It reports whether any waits, and returns the first error.
func (t *tags) acknowledge(done []uint64, most int, ack acker) (waits bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, tag := range done {
		if t.end(tag) {
			t.waiting = append(t.waiting, tag)
		}
	}
	err = t.prefix(ack)
	if n := len(t.waiting); n > most {
		err = cmp.Or(err, t.tell(n, ack))
	}
	return len(t.waiting) > 0, err
}

// hasten acknowledges what has waited since the last look, and reports whether any still waits.
func (t *tags) hasten(ack acker) (waits bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err = t.tell(t.late, ack)
	t.late = len(t.waiting)
	return t.late > 0, err
}

// flush acknowledges all that waits.
func (t *tags) flush(ack acker) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.tell(len(t.waiting), ack)
}

// open returns how many deliveries are in work.
func (t *tags) open() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, ended := range t.ended {
		if !ended {
			n++
		}
	}
	return n
}

// end notes that a delivery is no longer in work. It reports whether it was.
func (t *tags) end(tag uint64) bool {
	i := tag - t.first
	if tag < t.first || i >= uint64(len(t.ended)) || t.ended[i] {
		return false
	}
	t.ended[i] = true
	return true
}

// prefix drops what has ended before the lowest tag in work, and writes one acknowledgement for what waits of it.
func (t *tags) prefix(ack acker) error {
	before := t.first
	for len(t.ended) > 0 && t.ended[0] {
		t.ended = t.ended[1:]
		t.first++
	}
	if t.first == before {
		return nil
	}
	last, late, rest := uint64(0), t.late, t.waiting[:0]
	for i, tag := range t.waiting {
		if tag >= t.first {
			rest = append(rest, tag)
			continue
		}
		last = max(last, tag)
		if i < t.late {
			late--
		}
	}
	t.waiting, t.late = rest, late
	if last == 0 {
		return nil
	}
	return ack(last, last > before)
}

// tell acknowledges the first n that wait, one by one. It returns the first error.
func (t *tags) tell(n int, ack acker) (err error) {
	for _, tag := range t.waiting[:n] {
		err = cmp.Or(err, ack(tag, false))
	}
	t.waiting = slices.Delete(t.waiting, 0, n)
	t.late = max(t.late-n, 0)
	return err
}
