package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

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
	tag := i.src.cfg.Name + "-" + uuid.NewString()
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
