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
// The consumer polls the broker every two seconds. It reconnects if the broker has not answered for five seconds,
// or for one and a half heartbeats if that is less. The broker must also notice a silent connection before it
// redelivers the messages of that connection. It needs two to three heartbeats for that. The heartbeat is set in
// the amqp.Config of the dial function, 10 s by default.
//
// After a lost connection, a closed channel, a deleted queue or a restarted broker the consumer starts a new
// session, with a backoff of up to 2 seconds. The log and Ready name a queue that does not exist. Run declares
// nothing, and continues after Setup has declared the queue again. RabbitMQ 3.10 confirms the declaration of a
// quorum queue before it is on disk. If the broker is killed at that moment, it restarts with a queue that accepts
// no messages; delete it and call Setup.
//
// An error of inbox.Unavailable, for example from a stopped database, keeps the message. If another message that
// started later succeeds, the server is up. The failed message then goes behind the others for about two seconds;
// if it fails again, the failure is its own and counts as an attempt. The consumer pauses when 16 messages have
// failed, or as many as Prefetch, or when one message has waited 5 seconds for another running message. While
// paused, it cancels its consumer and tries a few messages at a time, at intervals of up to about 2 seconds, until
// one succeeds. It tries messages that have not failed first, and tries more messages while those run for over 2
// seconds. If no other message starts for 1.5 seconds, the failed messages are tried again, and the consumer
// pauses if they fail.

// session is one channel, on a connection of its own. It is discarded after any fault. Each delivery refers to its
// session, so it is never settled on a later one.
type session struct {
	src    *source
	conn   *amqpconn.Conn
	ch     *amqp.Channel
	intake intake
	notes  *notes

	received atomic.Bool // a delivery on this session

	tags    tags
	passing atomic.Int64  // in-flight messages that only pass through
	most    atomic.Int64  // how many of these may wait
	crowded chan struct{} // notifies the receiver of more than that

	mostLate atomic.Int64 // how many acknowledgements may wait for earlier messages; set by the receiver

	mu    sync.Mutex // held while deliveries are settled
	over  bool
	looks bool // hasten is scheduled
}

// ackPatience is the time between two runs of hasten, which writes acknowledgements that wait for earlier
// messages. It writes those that already waited at its previous run. So none waits for more than twice this time.
const ackPatience = 100 * time.Millisecond

// delivery is one delivery of a message.
type delivery struct {
	session *session
	raw     amqp.Delivery
	read    sync.Once
	msg     *inbox.Message
	wait    time.Duration // the rest of a long delay, if the message only passes through
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

// Start implements driver.Session. Deliveries to an earlier consumer of this channel do not count towards the
// window.
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

// Stop implements driver.Session. An ordered consumer is not cancelled, and received messages stay unsettled until
// the next Start or Close. After a cancellation, a quorum queue with a single active consumer would activate the
// next consumer, and requeue messages in transit out of order.
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

// Ack implements driver.Session, with as few writes as safely possible.
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

// hasten writes the acknowledgements that have waited too long. A failed write ends the session.
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

// settle settles deliveries of this session. It fails for all of them after the session has ended. A failed write
// has no effect: the broker delivers all of them again.
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

// gone reports whether the session has ended, so that the broker delivers unsettled messages again.
func (s *session) gone() bool {
	select {
	case <-s.conn.Done():
		return true
	default:
		return s.ch.IsClosed()
	}
}

// Close implements driver.Session: it closes the channel without cancelling the consumer. A quorum queue then
// requeues the unsettled messages in one step and in order, before it delivers to another consumer. After a
// cancellation the next consumer would start earlier.
func (s *session) Close(ctx context.Context) error {
	defer bound(ctx, s.conn)()
	s.notes.end()
	defer s.notes.done.Wait()
	s.mu.Lock()
	if !s.over && !s.gone() {
		_ = s.conn.Within(func() error { return s.tags.flush(s.ch.Ack) }) // if this fails, the messages are delivered again
	}
	s.over = true
	s.mu.Unlock()
	// The reply shows that the broker has read the acknowledgements.
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

// intake receives the messages of a session. Only the receiving goroutine may use it.
type intake struct {
	session *session
	src     *source
	conn    *amqpconn.Conn
	ch      *amqp.Channel
	closes  <-chan *amqp.Error
	cancels <-chan string

	tag        string               // of the consumer; "" without a consumer
	window     int                  // of the consumer
	renewals   int                  // of the consumer, since Start
	deliveries <-chan amqp.Delivery // nil without a consumer
	stopped    bool                 // Receive returns nothing
	kept       []driver.Delivery    // received, but not yet returned
}

func (i *intake) subscribe(window int) error {
	if err := i.conn.Within(func() error { return i.ch.Qos(window, 0, false) }); err != nil {
		return fmt.Errorf("set prefetch: %w", err)
	}
	// Each consumer needs a new tag. Older RabbitMQ, for example 3.10.8, closes the channel if a tag is used again
	// while deliveries to the same tag are unsettled (rabbitmq-server#5927).
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
	i.session.mostLate.Store(int64(window) / 4) // each of these uses a place in the window
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

// gather takes the messages that have arrived. The client passes them on one by one, and needs a turn of the
// scheduler for each.
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

// accept keeps a received message for Receive, unless it only passes through.
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

// cause returns why the delivery channel was closed. If the AMQP channel was closed, the client closes all
// listeners, including the one for cancellations.
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

// unsubscribe cancels the consumer, and keeps the messages in transit.
func (i *intake) unsubscribe() error {
	if i.deliveries == nil {
		return nil
	}
	if err := i.conn.Within(func() error { return i.ch.Cancel(i.tag, false) }); err != nil {
		return fmt.Errorf("cancel consumer: %w", err)
	}
	for raw := range i.deliveries { // ends, because the client has received everything sent before the reply
		i.accept(raw)
	}
	i.deliveries = nil
	return nil
}

// renew replaces the consumer. The new consumer has a whole window. Otherwise messages that wait to pass through,
// for example during an alarm of the broker, would block the others. An ordered consumer is not replaced, because
// that would activate the next process.
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

// take returns at most the given number of kept messages.
func (i *intake) take(most int) []driver.Delivery {
	n := min(most, len(i.kept))
	ds := i.kept[:n:n]
	if i.kept = i.kept[n:]; len(i.kept) == 0 {
		i.kept = nil
	}
	return ds
}

// tags tracks which deliveries of a channel are settled, so that one acknowledgement can cover several. The broker
// applies "multiple" to all lower tags, even of messages in flight, so it may only be used for a settled prefix.
// Acknowledgements beyond the prefix may wait for a short time until the prefix has grown, because a separate
// acknowledgement costs the broker as much as the message did.
type tags struct {
	mu      sync.Mutex
	first   uint64   // the lowest tag in flight; lower tags were dropped
	ended   []bool   // from first on: settled or done
	waiting []uint64 // done, but not yet acknowledged
	late    int      // the first of waiting, which already waited at the last hasten
}

// add adds a delivery. Tags start at 1 and have no gaps. After a gap, nothing would be acknowledged together.
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

// settle records that a delivery was settled separately. Later deliveries may have waited for it.
func (t *tags) settle(tag uint64, ack acker) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end(tag)
	return t.prefix(ack)
}

// acknowledge records deliveries as done and writes one acknowledgement for the settled prefix. The others wait;
// if more than most wait, each gets its own acknowledgement. The lock is held meanwhile, so that no later prefix
// is written first. It reports whether any waits, and returns the first error.
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

// hasten acknowledges deliveries that already waited at its last call, and reports whether any still waits.
func (t *tags) hasten(ack acker) (waits bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err = t.tell(t.late, ack)
	t.late = len(t.waiting)
	return t.late > 0, err
}

// flush acknowledges all waiting deliveries.
func (t *tags) flush(ack acker) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.tell(len(t.waiting), ack)
}

// open returns the number of deliveries in flight.
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

// end records that a delivery is no longer in flight. It reports whether it was in flight.
func (t *tags) end(tag uint64) bool {
	i := tag - t.first
	if tag < t.first || i >= uint64(len(t.ended)) || t.ended[i] {
		return false
	}
	t.ended[i] = true
	return true
}

// prefix drops ended tags before the lowest one in flight, and writes one acknowledgement for the waiting ones
// among them.
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

// tell acknowledges the first n waiting deliveries, one by one. It returns the first error.
func (t *tags) tell(n int, ack acker) (err error) {
	for _, tag := range t.waiting[:n] {
		err = cmp.Or(err, ack(tag, false))
	}
	t.waiting = slices.Delete(t.waiting, 0, n)
	t.late = max(t.late-n, 0)
	return err
}
