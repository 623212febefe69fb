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
// They lie in <prefix>failed.<class>, for the classes default and those of ConsumerConfig.Classes, and the others in
// that of default. The prefix is the name of the consumer's queue and a dot, unless ConsumerConfig.DeadLetterPrefix is set.
// A dead letter has its envelope and headers, and in
// headers of ours the class, the error with its Go type and SQLSTATE, the fingerprint, the attempts
// and their history, the times of the first and the last failure, the consumer, and the queue, exchange
// and routing key they came from. Left out of every copy are the broker's own headers, BCC, what is not
// the slot in CC, the expiration and the user id. Of more than 64 KiB of headers only ours and those that
// name the message are kept. Consumer.DeadLetters lists, counts, returns and removes them.
//
// RabbitMQ hands out each letter once, and does not tell how many it has handed out. A look waits up to a
// second while a queue of dead letters has another consumer. If that stays, a paced Replay for example, or if
// the queue gives less than it has counted, the look is of a part, and its error is inbox.ErrHeld. What a
// session has not settled that is no consumer, because it took it with basic.get or has cancelled since, is
// missed without a word. So are the letters of a quorum queue without a leader, as when the majority of its
// nodes is down: RabbitMQ says that it is empty. After a look a quorum queue may take a moment to count its
// letters again. A look waits for that, a second or a little more; the next one may miss letters of a queue
// that takes longer.

// letters is a driver.DeadLetters: one queue for each class.
type letters struct {
	dial    amqpconn.Dial
	timeout time.Duration
	logger  *slog.Logger
	prefix  string
	classes []string
	// returned is a letter of a queue on its way back.
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

func (l *letters) queue(class string) string { return driver.DeadLetterQueue(l.prefix, class) }

// Scan implements driver.DeadLetters. A letter that returns leaves its queue once the broker has
// confirmed it in the other.
func (l *letters) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	copies, end := l.publisher(ctx)
	defer end()
	conn, err := amqpconn.Open(ctx, l.dial, l.timeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	lasting, release := runloop.Detach(ctx, giveBackPatience) // what was received goes back
	defer release()
	stop := context.AfterFunc(lasting, conn.Close)
	defer stop()
	s := scan{conn: conn, name: l.queue(class), class: class, returned: l.returned, symfony: l.symfony, copies: copies, visit: visit, failed: failed}
	if err := s.run(ctx); err != nil {
		return cmp.Or(ctx.Err(), err)
	}
	return nil
}

// A scan is sent so many letters before it has looked at them, which are in memory: RabbitMQ counts letters,
// not bytes. The first window is small, and the later ones have about scanBytes, going by the largest letter so far.
const (
	firstScan = 4
	maxScan   = 16
	scanBytes = 8 << 20
)

// nextWindow is how many letters the next window has, after one of so many and a largest letter of so many bytes.
func nextWindow(before, largest int) int {
	if before == 0 {
		return firstScan
	}
	return min(2*before, maxScan, max(scanBytes/max(largest, 1), 1))
}

// scan goes through a dead-letter queue. It receives without acknowledging, so that every message
// comes once, and gives everything back that it does not delete. It consumes, for closing the channel
// then returns what is left in its order; a quorum queue does not do that for basic.get.
type scan struct {
	conn        *amqpconn.Conn
	name, class string
	returned    func(raw amqp.Delivery, queue string) amqpconn.Out
	symfony     *wire.Symfony
	copies      func() *amqpconn.Publisher
	visit       func(*inbox.DeadLetter) (driver.Outcome, error)
	failed      func(inbox.DeadLetter, error)
	removed     int

	ch         *amqp.Channel
	tag        string
	deliveries <-chan amqp.Delivery
	window     int // of the consumer: letters that it may still be sent
	size       int // of the window when it was new
	largest    int // bytes of a body so far
}

// run visits the queue as far as it is filled at the beginning. A session with letters in hand is waited
// for: as a rule it looks, as this one does, or has ended and the broker is about to notice.
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
		// Closing the channel returns what is not acknowledged, and waits until the
		// broker has read the acknowledgements. A failure of it outranks ErrHeld.
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
		if err := s.look(ctx, raw); err != nil {
			if errors.Is(err, driver.ErrDone) {
				return nil
			}
			return err
		}
	}
	return held
}

// next takes the next message. When the window is used up another consumer has a new one. A quorum
// queue takes back the messages of several in the order of their tags.
func (s *scan) next(ctx context.Context, n, left int) (raw amqp.Delivery, found bool, err error) {
	if err := ctx.Err(); err != nil {
		return raw, false, err
	}
	if s.window == 0 {
		s.size = nextWindow(s.size, s.largest)
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

// consume begins before the consumer of before is cancelled: others know by a consumer that letters are in hand.
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

// look visits one message and does what is said.
func (s *scan) look(ctx context.Context, raw amqp.Delivery) error {
	dead := readDead(raw, s.class, s.symfony)
	body := dead.Message.Body
	fate, err := s.visit(&dead)
	if err != nil || fate == driver.Keep {
		return err
	}
	if fate == driver.Return {
		if err := s.giveBack(ctx, raw, dead, body); err != nil {
			s.failed(dead, err)
			if unavailable(err) {
				return err
			}
			return nil
		}
	}
	if err := raw.Ack(false); err != nil {
		err = errors.Join(errors.New("a message was not deleted"), err)
		if fate == driver.Drop { // what returns has done so
			s.failed(dead, err)
		}
		return err
	}
	s.removed++
	s.window++ // the broker sends another one instead
	return nil
}

// A quorum queue takes a while to have messages again that were returned. Others may take them
// meanwhile, so the waits are bounded.
const (
	returnPatience = time.Second // while the queue counts none
	countPatience  = 10 * time.Second
	returnPoll     = 5 * time.Millisecond
	deliveryPoll   = 100 * time.Millisecond

	// giveBackPatience is how long a scan goes on whose context has ended, to give back what it has.
	giveBackPatience = 2 * returnPatience
)

// await waits for a message. It is false where others have taken what was counted. RabbitMQ 4
// counts what was returned before it delivers it, so a queue that counts messages is waited for longer.
func (s *scan) await(ctx context.Context) (raw amqp.Delivery, found bool, err error) {
	select { // as a rule it is there
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
			poll.Reset(deliveryPoll) // asking may have taken longer than that
			select {                 // a message may be on its way, or have come while the queue was asked
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

// lost is why the deliveries have ended.
func (s *scan) lost(found bool) error {
	if found {
		return nil
	}
	return fmt.Errorf("queue %q: the broker sends no more letters: %w", s.name, amqp.ErrClosed)
}

// awaitReturned waits until the queue counts so many messages again, also where ctx has ended. Otherwise a
// look right after this scan would miss them. It gives up without an error, since others may have taken
// them: a look at a queue that takes longer may miss some. RabbitMQ 4 counts them too early: there await waits.
func (s *scan) awaitReturned(ctx context.Context, want int) error {
	_, err := s.until(context.WithoutCancel(ctx), func(q amqp.Queue) bool { return q.Messages >= want })
	return err
}

// until asks for the counts of the queue until they fit, and returns the last. It asks for returnPatience;
// the last answer of a busy queue may take longer, as Count says.
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

// giveBack puts a message into the queue it came from. Its body was another before it was edited.
func (s *scan) giveBack(ctx context.Context, raw amqp.Delivery, dead inbox.DeadLetter, was []byte) error {
	if is := dead.Message.Body; !bytes.Equal(was, is) {
		if !bytes.Equal(raw.Body, was) { // the body is a part of what was sent
			return driver.ErrNotEditable
		}
		raw.Body = is
	}
	return s.copies().Confirmed(ctx, s.returned(raw, dead.Message.Queue))
}

// publisher returns what publishes copies, from the first one on, and ends it.
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
