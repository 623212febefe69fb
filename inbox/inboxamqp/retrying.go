package inboxamqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// Waiting messages.
//
// The messages that wait are in the delay queues, which all consumers of the virtual host share. A scan receives the
// messages of each queue without acknowledging them, chooses those of its consumer, and requeues the rest. Messages that
// are due meanwhile are late by the time of the scan, so a scan looks at 1,000 messages at most.
//
// A message that is made due is published to its queue, and a postponed one to another delay queue. It is acknowledged
// after the confirm. If the connection is lost between the two, the message is there twice.

// maxScanned bounds the messages of a scan of delay queues, of all consumers together.
const maxScanned = 1000

// waits is a driver.DeadLetters of the messages that wait in the delay queues.
type waits struct {
	letters *letters // for its connections
	cfg     *settings
}

// Retrying implements driver.Delayer.
func (s *source) Retrying() driver.DeadLetters { return &waits{newLetters(s.dial, s.cfg), s.cfg} }

// Retrying returns the messages that wait for their next attempt, or that a handler has put off, with the methods of
// dead letters: Replay makes an attempt due now, or after Replay.Delay, at most ConsumerConfig.Retry.MaxAge. Attempts
// stay. An ordered consumer delays its messages in the process, and they are not listed.
//
// The messages wait in queues that all consumers of the virtual host share. Each call reads these queues on a
// connection of its own and needs the permission to read them, and holdfast.delay and amq.default to write. It looks at
// 1,000 messages at most, of all consumers together, and returns an error if there are more. Messages that become due
// meanwhile are delivered when it ends. A call that loses its connection may leave a message there twice.
func (c *Consumer) Retrying() inbox.DeadLetters {
	return driver.NewRetrying(c.source.Retrying(), c.cfg.memory.Retention, c.cfg.Logger)
}

// Exclusive reports that RabbitMQ delivers a message to one session at a time.
func (w *waits) Exclusive() bool { return true }

// Depths implements driver.DeadLetters. It counts notes.
func (w *waits) Depths(ctx context.Context) ([]driver.Depth, error) {
	depths := []driver.Depth{{Class: driver.WaitingPutOff}, {Class: driver.WaitingRetry}}
	err := amqpconn.Use(ctx, w.letters.dial, w.letters.timeout, func(conn *amqpconn.Conn) (err error) {
		for i := range depths {
			if depths[i].Messages, err = depth(conn, w.cfg.noteQueue(depths[i].Class == driver.WaitingPutOff)); err != nil {
				return err
			}
		}
		return nil
	})
	return depths, err
}

// Scan implements driver.DeadLetters.
func (w *waits) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	lasting, release := runloop.Detach(ctx, giveBackPatience)
	defer release()
	copies, end := w.letters.publisher(lasting)
	defer end()
	conn, err := amqpconn.Open(ctx, w.letters.dial, w.letters.timeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(lasting, conn.Close)
	defer stop()
	one := waitScan{cfg: w.cfg, conn: conn, class: class, copies: copies, visit: visit, failed: failed, postponed: map[string]bool{}}
	var held error
	for _, step := range ladder {
		if one.over {
			break
		}
		s := scan{conn: conn, name: delayQueue(step), look: func(raw amqp.Delivery) (bool, error) { return one.look(lasting, raw) }}
		switch err := s.run(ctx); {
		case errors.Is(err, inbox.ErrHeld):
			held = err
		case err != nil:
			return cmp.Or(ctx.Err(), err)
		}
	}
	return held
}

// errCrowded ends a scan that has looked at maxScanned messages.
var errCrowded = fmt.Errorf("more than %d messages of all consumers wait: the others were not read", maxScanned)

// waitScan is a scan of the delay queues for one class.
type waitScan struct {
	cfg    *settings
	conn   *amqpconn.Conn
	class  string
	copies func() *amqpconn.Publisher
	visit  func(*inbox.DeadLetter) (driver.Outcome, error)
	failed func(inbox.DeadLetter, error)

	seen      int             // messages of all consumers
	postponed map[string]bool // marks of the messages that this scan has postponed
	over      bool            // visit has ended the scan
}

// mark distinguishes the copies of a message.
func mark(id string, headers amqp.Table) string {
	due, _ := wire.HeaderString(headers[wire.HeaderDue])
	return id + " " + due
}

// look visits one message, if it is one of the consumer and the class, and applies the outcome.
func (s *waitScan) look(ctx context.Context, raw amqp.Delivery) (gone bool, err error) {
	if s.seen++; s.seen > maxScanned {
		return false, errCrowded
	}
	putOff := raw.Headers[wire.HeaderPutOff] != nil
	if !slices.Contains(s.cfg.read(), raw.RoutingKey) || putOff != (s.class == driver.WaitingPutOff) || s.postponed[mark(raw.MessageId, raw.Headers)] {
		return false, nil
	}
	found := driver.NewWaiting(convert(raw, raw.RoutingKey, s.cfg.symfony), s.class, timeHeader(raw, wire.HeaderDue))
	outcome, err := s.visit(&found)
	s.over = err != nil
	if err != nil || outcome == driver.Keep {
		return false, err
	}
	if outcome == driver.Return {
		out := s.moved(raw, time.Until(found.DueAt), putOff)
		if err := s.copies().Confirmed(ctx, out); err != nil {
			s.failed(found, err)
			if unavailable(err) {
				return false, err
			}
			return false, nil
		}
		s.postponed[mark(raw.MessageId, out.Message.Headers)] = true
	}
	if err := raw.Ack(false); err != nil {
		err = errors.Join(errors.New("a message was not deleted"), err)
		if outcome == driver.Drop { // for Return, the copy was published already
			s.failed(found, err)
		}
		return false, err
	}
	if outcome == driver.Drop {
		s.forget(putOff)
	}
	return true, nil
}

// moved returns the copy that is due after a delay. Its note stays: the process that receives the message removes it.
func (s *waitScan) moved(raw amqp.Delivery, delay time.Duration, putOff bool) amqpconn.Out {
	copied := duplicate(raw)
	out := s.cfg.toWait(raw.RoutingKey, copied, max(delay, 0), putOff)
	if delay <= 0 {
		setWait(copied, 0)
		out.exchange = ""
	}
	return amqpconn.Out{Exchange: out.exchange, Key: out.key, Message: copied}
}

// forget removes the note of a dropped message. A failure only makes a count wrong.
func (s *waitScan) forget(putOff bool) {
	queue := s.cfg.noteQueue(putOff)
	if err := s.conn.Try(func(ch *amqp.Channel) error {
		_, _, err := ch.Get(queue, true)
		return err
	}); err != nil {
		s.cfg.Logger.Warn("note of a dropped message stays", slog.String("note_queue", queue), slog.Any("error", err))
	}
}
