package inboxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/blame"
)

// ErrNotRunning is returned by Ready while no Run is at work.
var ErrNotRunning = errors.New("inboxtest: broker is not running")

// Broker is a queue in memory that delivers to a Processor as a consumer on a real broker
// does: at least once, failed messages again after a delay, hopeless ones to the dead
// letters. It is safe for concurrent use.
type Broker struct {
	processor inbox.Processor
	cfg       Config
	dead      DeadLetters
	suspects  blame.Suspects

	mu       sync.Mutex
	changed  *sync.Cond // of anything below
	ready    []*delivery
	held     []held // failed for want of a server, as it seems
	clock    int    // tells which message began or failed before another
	delayed  int    // waiting for their retry
	inFlight int
	paused   int // pauses under way
	running  int // Runs under way
}

// delivery is a message in the queue.
type delivery struct {
	msg  *inbox.Message
	last bool // DeliverTwice has had its way

	began   int  // on the broker's clock
	batched bool // processed together with others
}

// NewBroker returns a Broker with an empty queue.
func NewBroker(p inbox.Processor, cfg Config) (*Broker, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	if p == nil {
		err = errors.Join(errors.New("inboxtest: Processor is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	b := &Broker{processor: p, cfg: cfg}
	b.changed = sync.NewCond(&b.mu)
	b.dead.broker = b
	return b, nil
}

// Publish puts a copy of a message at the end of the queue. Its Queue, Attempt and failure
// times are set anew. What is wrong with a message shows when it is delivered, as with a
// real broker. It returns ctx's error when that has ended, and refuses nil.
func (b *Broker) Publish(ctx context.Context, m *inbox.Message) error {
	if m == nil {
		return errors.New("inboxtest: message is nil")
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("inboxtest: publish: %w", err)
	}
	msg := clone(m)
	msg.Queue, msg.Attempt, msg.Recovered, msg.Redelivered, msg.FirstFailedAt = b.cfg.Queue, 1, 0, false, time.Time{}
	b.put(&delivery{msg: msg})
	return nil
}

func clone(m *inbox.Message) *inbox.Message {
	c := *m
	c.Body, c.Headers = bytes.Clone(m.Body), maps.Clone(m.Headers)
	return &c
}

// Ready returns nil while a Run is at work, else ErrNotRunning.
func (b *Broker) Ready(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running == 0 {
		return ErrNotRunning
	}
	return nil
}

// Idle waits until no message is in the queue, waiting for a retry, or being processed. It
// returns ctx's error when that ends first. Only a Run makes progress meanwhile.
func (b *Broker) Idle(ctx context.Context) error {
	stop := context.AfterFunc(ctx, b.wake)
	defer stop()
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.ready)+len(b.held)+b.delayed+b.inFlight > 0 {
		if ctx.Err() != nil {
			return fmt.Errorf("inboxtest: not idle: %w", ctx.Err())
		}
		b.changed.Wait()
	}
	return nil
}

// DeadLetters returns the messages that were given up.
func (b *Broker) DeadLetters() *DeadLetters { return &b.dead }

func (b *Broker) put(d *delivery) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ready = append(b.ready, d)
	b.changed.Broadcast()
}

// take waits for the next messages, at least one; nil when ctx has ended.
func (b *Broker) take(ctx context.Context) []*delivery {
	b.mu.Lock()
	defer b.mu.Unlock()
	for ctx.Err() == nil {
		if b.paused == 0 && len(b.ready)+b.inFlight == 0 {
			b.release() // there is no other message
		}
		if len(b.ready) > 0 && b.paused == 0 {
			n := b.together()
			taken := slices.Clone(b.ready[:n])
			b.ready = b.ready[n:]
			b.inFlight += n
			b.clock++
			for _, d := range taken {
				d.began, d.batched = b.clock, n > 1
			}
			return taken
		}
		b.changed.Wait()
	}
	return nil
}

// together is how many of the next messages make a batch.
func (b *Broker) together() int {
	for n, d := range b.ready[:min(b.cfg.Batch, len(b.ready))] {
		if d.msg.Attempt > 1 || b.suspects.Has(d.msg.ID) {
			return max(n, 1)
		}
	}
	return min(b.cfg.Batch, len(b.ready))
}

// settle ends a delivery with a change to the queue.
func (b *Broker) settle(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.inFlight--
	change()
	b.changed.Broadcast()
}

// wake lets everybody who waits look at their context.
func (b *Broker) wake() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changed.Broadcast()
}
