package inboxamqp

import (
	"context"
	"errors"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// fate is what a visit makes of a dead letter. One that is passed over does not count towards
// Filter.Limit: it lies at the head of its queue the next time, too.
type fate int

const (
	passOver fate = iota
	keep
	remove
)

// visit is called for a selected dead letter.
type visit func(raw amqp.Delivery, dead inbox.DeadLetter) (fate, error)

// each visits the dead letters that the filter selects, and returns how many were deleted.
func (l *deadLetters) each(ctx context.Context, filter inbox.Filter, fn visit) (removed int, err error) {
	if err := driver.CheckFilter(filter); err != nil {
		return 0, err
	}
	err = amqpconn.Use(ctx, l.dial, l.timeout, func(conn *amqpconn.Conn) error {
		s := scan{conn: conn, filter: filter, visit: fn}
		defer func() { removed = s.removed }()
		// All are counted first: what is returned from one queue may end in a later one.
		depths := make([]int, len(l.classes))
		for i, class := range l.classes {
			if depths[i], err = depth(conn, driver.DeadLetterQueue(l.prefix, class)); err != nil {
				return err
			}
		}
		for i, class := range l.classes {
			if err := s.queue(ctx, driver.DeadLetterQueue(l.prefix, class), class, depths[i]); err != nil {
				return err
			}
		}
		return nil
	})
	return removed, err
}

// scan goes through the dead-letter queues. It receives without acknowledging, so that
// every message comes once, and gives everything back that it does not delete.
type scan struct {
	conn    *amqpconn.Conn
	filter  inbox.Filter
	visit   visit
	taken   int // towards the limit
	removed int
}

func (s *scan) full() bool { return s.filter.Limit > 0 && s.taken >= s.filter.Limit }

// depth is how many messages a queue holds. A missing queue is empty.
func depth(conn *amqpconn.Conn, name string) (n int, err error) {
	err = conn.Try(func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
		n = q.Messages
		return err
	})
	if amqpconn.IsNotFound(err) {
		return 0, nil
	}
	return n, err
}

// queue scans one queue, as far as it was filled at the beginning.
func (s *scan) queue(ctx context.Context, name, class string, filled int) (err error) {
	if s.full() || filled == 0 {
		return nil
	}
	ch, err := s.conn.Channel()
	if err != nil {
		return err
	}
	before := s.removed
	defer func() {
		// Closing the channel returns what is not acknowledged, and waits until the
		// broker has read the acknowledgements.
		if closeErr := s.conn.Within(ch.Close); err == nil {
			err = closeErr
		}
		if err == nil {
			err = s.awaitReturned(ctx, name, filled-(s.removed-before))
		}
	}()
	for seen := 0; seen < filled && !s.full(); seen++ {
		found, err := s.awaitNext(ctx, ch, name, class)
		if err != nil || !found {
			return err
		}
	}
	return nil
}

// A quorum queue takes a while to have messages again that were returned. Others may take them
// meanwhile, so the waits are bounded.
const (
	returnPatience = time.Second // while the queue counts none
	countPatience  = 10 * time.Second
	returnPoll     = 5 * time.Millisecond
)

// awaitNext looks at the next message. It is false where others have taken what was counted.
// RabbitMQ 4 counts what was returned before it delivers it, so a queue that counts messages is
// asked longer.
func (s *scan) awaitNext(ctx context.Context, ch *amqp.Channel, name, class string) (bool, error) {
	for start := time.Now(); ; {
		found, err := s.next(ctx, ch, name, class)
		if found || err != nil {
			return found, err
		}
		ready, err := depth(s.conn, name)
		waited := time.Since(start)
		if err != nil || waited > countPatience || ready == 0 && waited > returnPatience {
			return false, err
		}
		if err := runloop.Sleep(ctx, returnPoll); err != nil {
			return false, err
		}
	}
}

// awaitReturned waits until a queue counts so many messages again, or who looks right after this
// scan would miss them. RabbitMQ 4 counts them too early: there awaitNext waits.
func (s *scan) awaitReturned(ctx context.Context, name string, want int) error {
	for end := time.Now().Add(returnPatience); ; {
		n, err := depth(s.conn, name)
		if err != nil || n >= want || time.Now().After(end) {
			return err
		}
		if err := runloop.Sleep(ctx, returnPoll); err != nil {
			return err
		}
	}
}

// next looks at one message. It is false where the queue has none to give.
func (s *scan) next(ctx context.Context, ch *amqp.Channel, name, class string) (found bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	var raw amqp.Delivery
	if err := s.conn.Within(func() (err error) {
		raw, found, err = ch.Get(name, false)
		return err
	}); err != nil || !found {
		return false, err
	}
	dead := readDead(raw, class)
	if !driver.Match(s.filter, dead) {
		return true, nil
	}
	what, err := s.visit(raw, dead)
	if err != nil {
		return false, err
	}
	if what != passOver {
		s.taken++
	}
	if what != remove {
		return true, nil
	}
	if err := raw.Ack(false); err != nil {
		return false, errors.Join(errors.New("a message was not deleted"), err)
	}
	s.removed++
	return true, nil
}
