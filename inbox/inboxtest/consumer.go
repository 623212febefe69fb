package inboxtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/blame"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

var errNotRunning = errors.New("inboxtest: consumer is not running")

// Consumer hands the messages of one queue of a Broker to a Processor and settles them by its
// answers, as a consumer on a real broker does: failed messages come again after a delay,
// hopeless ones become dead letters. Its methods may be called from any goroutine.
type Consumer struct {
	broker    *Broker
	queue     *queue
	processor inbox.Processor
	cfg       Config
	retention time.Duration // of what the processor remembers
	maxBody   int           // bytes
	suspects  blame.Suspects

	// The broker's lock guards these.
	running bool
	paused  int    // pauses under way
	held    []held // messages that failed for want of a server, as it seems
	clock   int    // orders the beginnings and failures of messages
	handed  int    // messages given to the processor in this Run
}

// NewConsumer returns a consumer of a queue, which it declares. Several may share one.
func NewConsumer(b *Broker, queue string, p inbox.Processor, cfg Config) (*Consumer, error) {
	cfg = cfg.withDefaults(queue)
	if err := cfg.validate(b, queue, p); err != nil {
		return nil, err
	}
	c := &Consumer{broker: b, queue: b.declare(queue, cfg.Names), processor: p, cfg: cfg, retention: driver.DefaultRetention, maxBody: driver.MaxBodyBytes}
	if d, ok := p.(driver.Deduplicator); ok {
		c.retention = d.Retention()
	}
	return c, nil
}

// Run delivers until ctx ends, or a limit of the Config is reached. Then it takes no further
// message, lets those in hand finish for ShutdownTimeout, cancels their context with
// inbox.ErrDraining, and returns nil when their handlers have returned. What was not finished is
// in the queue for the next Run. Calling it while it runs is an error.
func (c *Consumer) Run(ctx context.Context) error {
	if !c.begin() {
		return errors.New("inboxtest: Run is running already")
	}
	defer c.end()
	stop, halt := context.WithCancel(ctx)
	defer halt()
	if c.cfg.TimeLimit > 0 {
		stop, halt = context.WithTimeout(stop, c.cfg.TimeLimit)
		defer halt()
	}
	defer context.AfterFunc(stop, c.broker.wake)()

	work, release := c.workContext(stop)
	defer release()
	var workers, background sync.WaitGroup
	if b, ok := c.processor.(driver.Background); ok {
		background.Go(func() { b.Background(stop) })
	}
	for range c.cfg.Concurrency {
		workers.Go(func() {
			for ds := c.take(stop); ds != nil; ds = c.take(stop) {
				c.deliver(work, ds)
				if c.limitReached() {
					halt()
				}
			}
		})
	}
	workers.Wait()
	halt()
	background.Wait()
	return nil
}

func (c *Consumer) begin() (ok bool) {
	c.broker.change(func() {
		ok = !c.running
		c.running = true
		if ok {
			c.handed = 0
		}
	})
	return ok
}

func (c *Consumer) end() {
	c.broker.change(func() {
		c.release()
		c.running = false
	})
}

// workContext outlives ctx by what ShutdownTimeout leaves for handlers.
func (c *Consumer) workContext(ctx context.Context) (work context.Context, release func()) {
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	budget := c.cfg.ShutdownTimeout - min(c.cfg.ShutdownTimeout/10, 6*time.Second)
	var timer *time.Timer
	var mu sync.Mutex
	stop := context.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		timer = time.AfterFunc(budget, func() { cancel(inbox.ErrDraining) })
	})
	return work, func() {
		stop()
		mu.Lock()
		defer mu.Unlock()
		if timer != nil {
			timer.Stop()
		}
		cancel(nil)
	}
}

// take waits for the next messages, at least one; nil when ctx has ended.
func (c *Consumer) take(ctx context.Context) []*delivery {
	c.broker.mu.Lock()
	defer c.broker.mu.Unlock()
	q := c.queue
	for ctx.Err() == nil {
		if c.paused == 0 && len(q.ready)+q.inFlight == 0 {
			c.release() // there is no other message
		}
		if n := c.together(); n > 0 && c.paused == 0 {
			taken := slices.Clone(q.ready[:n])
			q.ready = q.ready[n:]
			q.inFlight += n
			c.handed += n
			c.clock++
			for _, d := range taken {
				d.began, d.batched = c.clock, n > 1
			}
			return taken
		}
		c.broker.changed.Wait()
	}
	return nil
}

// together is how many of the next messages make a batch.
func (c *Consumer) together() int {
	most := min(c.cfg.Batch, len(c.queue.ready))
	if limit := c.cfg.MessageLimit; limit > 0 {
		most = min(most, limit-c.handed)
	}
	for n, d := range c.queue.ready[:most] {
		if d.msg.Attempt > 1 || c.suspects.Has(d.msg.ID) {
			return max(n, 1)
		}
	}
	return most
}

func (c *Consumer) limitReached() bool {
	c.broker.mu.Lock()
	defer c.broker.mu.Unlock()
	return c.cfg.MessageLimit > 0 && c.handed >= c.cfg.MessageLimit ||
		c.cfg.MemoryLimit > 0 && runloop.MemoryInUse() > c.cfg.MemoryLimit
}

// Ready returns nil while Run is at work.
func (c *Consumer) Ready(context.Context) error {
	c.broker.mu.Lock()
	defer c.broker.mu.Unlock()
	if !c.running {
		return errNotRunning
	}
	return nil
}

// DeadLetters returns the dead letters of the queue.
func (c *Consumer) DeadLetters() inbox.DeadLetters {
	return &deadLetters{c.broker, c.queue, c.retention}
}
