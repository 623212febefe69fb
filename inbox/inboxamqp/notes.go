package inboxamqp

import (
	"context"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// The delay queues are shared, so their depths do not say how many messages of one consumer wait. Each waiting
// message therefore has a note, an empty message, in a queue of its consumer. The process to which the message
// returns takes one note away. Where a process dies in between, a note is left over until noteAge.

const (
	// noteAge is how long a note is kept: longer than the longest step of the ladder.
	noteAge = time.Hour
	// notesAtOnce bounds how many notes are taken within one call's time.
	notesAtOnce = 100
)

// noteQueue is the queue of the notes of messages that have failed, or of those that are put off.
func (s *settings) noteQueue(putOff bool) string {
	if putOff {
		return s.queue + ".putoff"
	}
	return s.queue + ".retrying"
}

func (s *settings) noteQueues() (specs []queueSpec) {
	for _, putOff := range []bool{false, true} {
		specs = append(specs, queueSpec{name: s.noteQueue(putOff), kind: s.queueType(), use: noted, args: amqp.Table{"x-message-ttl": noteAge.Milliseconds()}})
	}
	return specs
}

// leave publishes the notes of messages that wait. Nobody waits for the confirms, and a failure only makes a count wrong.
func (c *copier) leave(ctx context.Context, outs []*outgoing) {
	for _, out := range outs {
		if out.err == nil && out.note != "" {
			c.publisher.Publish(ctx, amqpconn.Out{Key: out.note, Message: amqp.Publishing{DeliveryMode: amqp.Persistent}}, func(error) {})
		}
	}
}

// noteOf is the queue that has a note of a delivery; empty: none has. One that is redelivered has none any more.
func (s *settings) noteOf(d amqp.Delivery) string {
	if d.Redelivered || d.Headers[wire.HeaderDelay] == nil {
		return ""
	}
	return s.noteQueue(d.Headers[wire.HeaderPutOff] != nil)
}

// notes takes the notes of messages that have returned, on a goroutine that runs while there are any.
type notes struct {
	conn *amqpconn.Conn

	mu      sync.Mutex
	due     map[string]int // notes to take, by queue
	running bool
	over    bool
	done    sync.WaitGroup
}

func newNotes(conn *amqpconn.Conn) *notes { return &notes{conn: conn, due: map[string]int{}} }

// take has one note taken from a queue.
func (n *notes) take(queue string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.over {
		return
	}
	n.due[queue]++
	if !n.running {
		n.running = true
		n.done.Go(n.run)
	}
}

func (n *notes) run() {
	for queue, count := n.next(); count > 0; queue, count = n.next() {
		err := n.conn.Try(func(ch *amqp.Channel) error {
			for range count {
				if _, found, err := ch.Get(queue, true); err != nil || !found {
					return err
				}
			}
			return nil
		})
		if err != nil { // the queue is missing or the connection has ended: a count is wrong until noteAge
			n.drop(queue)
		}
	}
}

// next returns how many notes to take now, and from which queue. Zero: none, and the goroutine ends.
func (n *notes) next() (queue string, count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.over {
		for queue, all := range n.due {
			count = min(all, notesAtOnce)
			if n.due[queue] -= count; n.due[queue] == 0 {
				delete(n.due, queue)
			}
			return queue, count
		}
	}
	n.running = false
	return "", 0
}

func (n *notes) drop(queue string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.due, queue)
}

// end takes no more notes. The goroutine ends after the call under way.
func (n *notes) end() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.over = true
}
