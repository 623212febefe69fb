package inboxamqp

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// Dead letters.
//
// Dead letters are in the queues <prefix>failed.<class>, for the class default and the classes of
// ConsumerConfig.Classes. Other classes use the queue of the class default. The prefix is the name of the
// consumer's queue and a dot, unless ConsumerConfig.DeadLetterPrefix is set. A dead letter keeps its envelope and
// headers. Headers of ours add the class, the error with its Go type and SQLSTATE, the fingerprint, the attempts
// and their history, the times of the first and the last failure, the consumer, and the original queue, exchange
// and routing key. Every copy omits the broker's own headers, BCC, routes in CC other than the slot, the
// expiration and the user id. If the headers have more than 64 KiB, only our headers and those that identify the
// message are kept. Consumer.DeadLetters lists, counts, returns and removes dead letters.
//
// RabbitMQ delivers each message to one consumer only, and does not report how many are in flight. If a
// dead-letter queue has another consumer, a scan waits for it up to a second. If that consumer stays, for example
// a paced Replay, or if the queue delivers fewer messages than it counted, the scan is partial and its error is
// inbox.ErrHeld. Two cases are missed without an error. The first is messages held by a session without a
// consumer, because it used basic.get or cancelled its consumer. The second is a quorum queue without a leader,
// for example because most of its nodes are down: RabbitMQ reports it as empty. After a scan a quorum queue may
// need a moment to count its messages again. A scan waits for that, a second or a little more. If the queue takes
// longer, the next scan may miss messages.

// letters is a driver.DeadLetters: one queue for each class.
type letters struct {
	dial    amqpconn.Dial
	timeout time.Duration
	logger  *slog.Logger
	prefix  string
	classes []string
	// returned returns a dead letter of a queue in the form in which it goes back.
	returned func(raw amqp.Delivery, queue string) amqpconn.Out
	symfony  *wire.Symfony
}

func newLetters(dial amqpconn.Dial, cfg *settings) *letters {
	return &letters{dial: dial, timeout: cfg.Timeout, logger: cfg.Logger, prefix: cfg.DeadLetterPrefix, classes: cfg.places(), returned: cfg.returned, symfony: cfg.symfony}
}

// Depths implements driver.DeadLetters.
func (l *letters) Depths(ctx context.Context) ([]driver.Depth, error) {
	depths := make([]driver.Depth, len(l.classes))
	err := amqpconn.Use(ctx, l.dial, l.timeout, func(conn *amqpconn.Conn) error {
		for i, class := range l.classes {
			q, err := conn.Count(l.queue(class))
			if err != nil {
				return err
			}
			depths[i] = driver.Depth{Class: class, Messages: q.Messages, Held: q.Consumers > 0}
		}
		return nil
	})
	return depths, err
}

// Exclusive reports that RabbitMQ delivers a message to one session at a time.
func (l *letters) Exclusive() bool { return true }

func (l *letters) queue(class string) string { return driver.DeadLetterQueue(l.prefix, class) }

// Scan implements driver.DeadLetters. A dead letter that returns is deleted after the broker confirmed it in its
// original queue.
func (l *letters) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	lasting, release := runloop.Detach(ctx, giveBackPatience)
	defer release()
	copies, end := l.publisher(lasting)
	defer end()
	conn, err := amqpconn.Open(ctx, l.dial, l.timeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(lasting, conn.Close)
	defer stop()
	letter := letterScan{class: class, returned: l.returned, symfony: l.symfony, copies: copies, visit: visit, failed: failed}
	s := scan{conn: conn, name: l.queue(class), look: func(raw amqp.Delivery) (bool, error) { return letter.look(lasting, raw) }}
	if err := s.run(ctx); err != nil {
		return cmp.Or(ctx.Err(), err)
	}
	return nil
}

// These bound the number of messages that are in memory before the scan visits them, because RabbitMQ limits
// prefetch by messages, not bytes. The first window is small. Later windows have about scanBytes, estimated by the
// largest message of the last windows.
const (
	firstScan = 4
	maxScan   = 16
	scanBytes = 8 << 20
)

// nextWindow returns the number of messages of the next window, from the size of the previous window and the
// largest body in bytes.
func nextWindow(before, largest int) int {
	if before == 0 {
		return firstScan
	}
	return min(2*before, maxScan, max(scanBytes/max(largest, 1), 1))
}

// scan visits the messages of a dead-letter queue, or of a delay queue. It receives without acknowledging, so that every message
// arrives once, and returns every message that it does not delete. It uses a consumer, because closing the channel
// then returns the unacknowledged messages in order. With basic.get a quorum queue does not keep the order.
type scan struct {
	conn *amqpconn.Conn
	name string
	// look visits one message, and reports whether it acknowledged the message.
	look    func(raw amqp.Delivery) (gone bool, err error)
	removed int

	ch         *amqp.Channel
	tag        string
	deliveries <-chan amqp.Delivery
	window     int // how many more messages the broker may send to the consumer
	size       int // of the window at its start
	largest    int // largest body of late, in bytes: each window without larger ones halves it
}

// run visits as many messages as the queue has at the start. First it waits for other consumers. Usually that is
// another scan, or a session that has ended and that the broker is about to close.
func (s *scan) run(ctx context.Context) (err error) {
	q, err := s.until(ctx, func(q amqp.Queue) bool { return q.Consumers == 0 })
	if err != nil {
		return err
	}
	var held error
	if q.Consumers > 0 {
		held = inbox.ErrHeld
	}
	filled := q.Messages
	if filled == 0 {
		return held
	}
	if s.ch, err = s.conn.Channel(); err != nil {
		return err
	}
	defer func() {
		// Closing the channel returns unacknowledged messages, and waits until the broker has read the
		// acknowledgements. Its failure takes precedence over ErrHeld.
		after := cmp.Or(s.conn.Within(s.ch.Close), s.awaitReturned(ctx, filled-s.removed))
		if err == nil || errors.Is(err, inbox.ErrHeld) {
			err = cmp.Or(after, err)
		}
	}()
	for n := range filled {
		raw, found, err := s.next(ctx, n, filled-n)
		if err != nil {
			return err
		}
		if !found {
			filled = n
			return inbox.ErrHeld
		}
		gone, err := s.look(raw)
		if gone {
			s.removed++
			s.window++ // the broker sends another one instead
		}
		if errors.Is(err, driver.ErrDone) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return held
}

// next receives the next message. When the window is used up, it starts another consumer with a new window. A
// quorum queue requeues the messages of several consumers in the order of their tags.
func (s *scan) next(ctx context.Context, n, left int) (raw amqp.Delivery, found bool, err error) {
	if err := ctx.Err(); err != nil {
		return raw, false, err
	}
	if s.window == 0 {
		s.size = nextWindow(s.size, s.largest)
		s.largest /= 2
		if err := s.consume(fmt.Sprintf("scan-%08d", n), min(left, s.size)); err != nil {
			return raw, false, err
		}
	}
	raw, found, err = s.await(ctx)
	if found {
		s.window--
		s.largest = max(s.largest, len(raw.Body))
	}
	return raw, found, err
}

// consume starts before the previous consumer is cancelled. Other scans see from the consumer that messages are in
// flight.
func (s *scan) consume(tag string, window int) error {
	return s.conn.Within(func() (err error) {
		if err := s.ch.Qos(window, 0, false); err != nil {
			return err
		}
		before := s.tag
		s.tag, s.window = tag, window
		s.deliveries, err = s.ch.Consume(s.name, tag, false, false, false, false, nil)
		if err != nil || before == "" {
			return err
		}
		return s.ch.Cancel(before, false)
	})
}

// letterScan is a scan of the dead letters of a class.
type letterScan struct {
	class    string
	returned func(raw amqp.Delivery, queue string) amqpconn.Out
	symfony  *wire.Symfony
	copies   func() *amqpconn.Publisher
	visit    func(*inbox.DeadLetter) (driver.Outcome, error)
	failed   func(inbox.DeadLetter, error)
}

// look visits one message and applies the outcome.
func (s *letterScan) look(ctx context.Context, raw amqp.Delivery) (gone bool, err error) {
	dead := readDead(raw, s.class, s.symfony)
	body := dead.Message.Body
	fate, err := s.visit(&dead)
	if err != nil || fate == driver.Keep {
		return false, err
	}
	if fate == driver.Return {
		if err := s.giveBack(ctx, raw, dead, body); err != nil {
			s.failed(dead, err)
			if unavailable(err) {
				return false, err
			}
			return false, nil
		}
	}
	if err := raw.Ack(false); err != nil {
		err = errors.Join(errors.New("a message was not deleted"), err)
		if fate == driver.Drop { // for Return, the copy was published already
			s.failed(dead, err)
		}
		return false, err
	}
	return true, nil
}

// A quorum queue needs a while to count returned messages again. Other consumers may take them meanwhile, so the
// waits are bounded.
const (
	returnPatience = time.Second // while the queue counts no messages
	countPatience  = 10 * time.Second
	returnPoll     = 5 * time.Millisecond
	deliveryPoll   = 100 * time.Millisecond

	// giveBackPatience is the time that a scan has to return messages after its context ended. It also waits that long for
	// the confirm of a copy: otherwise the copy would be there beside the original.
	giveBackPatience = 2 * returnPatience
)

// await waits for a message. It returns false if other consumers took the counted messages. RabbitMQ 4 counts
// returned messages before it delivers them, so await waits longer while the queue counts messages.
func (s *scan) await(ctx context.Context) (raw amqp.Delivery, found bool, err error) {
	select { // usually it is already there
	case raw, found = <-s.deliveries:
		return raw, found, s.lost(found)
	default:
	}
	poll := time.NewTicker(deliveryPoll)
	defer poll.Stop()
	for start := time.Now(); ; {
		select {
		case raw, found = <-s.deliveries:
			return raw, found, s.lost(found)
		case <-ctx.Done():
			return raw, false, ctx.Err()
		case <-poll.C:
		}
		ready, err := depth(s.conn, s.name)
		waited := time.Since(start)
		if err != nil {
			return raw, false, err
		}
		if waited > countPatience || ready == 0 && waited > returnPatience {
			poll.Reset(deliveryPoll) // the request may have taken longer than that
			select {                 // a message may have arrived during the request
			case raw, found = <-s.deliveries:
				return raw, found, s.lost(found)
			case <-ctx.Done():
				return raw, false, ctx.Err()
			case <-poll.C:
				return raw, false, nil
			}
		}
	}
}

// lost returns the error of a closed delivery channel.
func (s *scan) lost(found bool) error {
	if found {
		return nil
	}
	return fmt.Errorf("queue %q: delivery channel closed: %w", s.name, amqp.ErrClosed)
}

// awaitReturned waits until the queue counts the wanted number of messages again, even if ctx has ended. Otherwise
// a scan right after this one would miss them. It gives up without an error, because other consumers may have
// taken the messages; then the next scan may miss some. RabbitMQ 4 counts them too early; await waits for that.
func (s *scan) awaitReturned(ctx context.Context, want int) error {
	_, err := s.until(context.WithoutCancel(ctx), func(q amqp.Queue) bool { return q.Messages >= want })
	return err
}

// until polls the counts of the queue until fit accepts them, and returns the last ones. It polls for
// returnPatience; the last answer of a busy queue may take longer, see Count.
func (s *scan) until(ctx context.Context, fit func(amqp.Queue) bool) (amqp.Queue, error) {
	for end := time.Now().Add(returnPatience); ; {
		q, err := s.conn.Count(s.name)
		if err != nil || fit(q) || time.Now().After(end) {
			return q, err
		}
		if err := runloop.Sleep(ctx, returnPoll); err != nil {
			return q, err
		}
	}
}

// giveBack publishes a message to its original queue. was is its body before it was edited.
func (s *letterScan) giveBack(ctx context.Context, raw amqp.Delivery, dead inbox.DeadLetter, was []byte) error {
	if is := dead.Message.Body; !bytes.Equal(was, is) {
		if !bytes.Equal(raw.Body, was) { // the body is only a part of the original payload
			return driver.ErrNotEditable
		}
		raw.Body = is
	}
	return s.copies().Confirmed(ctx, s.returned(raw, dead.Message.Queue))
}

// publisher returns a function that starts a publisher for copies on its first call, and a function that ends the
// publisher.
func (l *letters) publisher(ctx context.Context) (copies func() *amqpconn.Publisher, end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	copies = sync.OnceValue(func() *amqpconn.Publisher {
		p := amqpconn.NewPublisher(amqpconn.PublisherConfig{Dial: l.dial, Timeout: l.timeout, Logger: l.logger})
		running.Go(func() { p.Run(ctx) })
		return p
	})
	return copies, func() {
		cancel()
		running.Wait()
	}
}
