package inboxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Broker is what RabbitMQ is between a relay and its consumers, in memory: queues that deliver at
// least once. It is a publisher for outbox.NewRelay. It is safe for concurrent use.
type Broker struct {
	mu      sync.Mutex
	changed *sync.Cond // of anything in the queues
	queues  map[string]*queue
}

// queue is a queue of a broker, with its dead letters. The broker's lock guards it.
type queue struct {
	name     string
	patterns []string // of message names
	ready    []*delivery
	waiting  int // for a retry, or with a consumer that pauses
	inFlight int
	dead     []inbox.DeadLetter // oldest first
}

// delivery is a message in a queue.
type delivery struct {
	msg      *inbox.Message
	repeated bool // as Config.DeliverTwice asks

	began   int  // on the consumer's clock
	batched bool // processed together with others
}

// NewBroker returns a Broker without queues: NewConsumer declares them.
func NewBroker() *Broker {
	b := &Broker{queues: map[string]*queue{}}
	b.changed = sync.NewCond(&b.mu)
	return b
}

// declare returns the queue of a name and binds it to the patterns.
func (b *Broker) declare(name string, patterns []string) *queue {
	b.mu.Lock()
	defer b.mu.Unlock()
	q := b.queues[name]
	if q == nil {
		q = &queue{name: name}
		b.queues[name] = q
	}
	q.patterns = append(q.patterns, patterns...)
	return q
}

// Publish implements driver.Publisher of outbox: it puts a copy of the message into every queue
// whose consumer wants messages of its name. Without any the message is unroutable.
func (b *Broker) Publish(ctx context.Context, m driver.Message, done func(error)) {
	err := ctx.Err()
	switch {
	case err != nil:
		err = &driver.PublishError{Class: driver.Unavailable, Err: err}
	case !b.route(&inbox.Message{
		ID: m.ID, Name: m.Name, Body: m.Body, ContentType: m.ContentType, Headers: m.Headers, PublishedAt: m.CreatedAt,
	}):
		err = &driver.PublishError{Class: driver.Unroutable, Err: fmt.Errorf("inboxtest: no queue wants messages named %q", m.Name)}
	}
	done(err)
}

// Send is Publish for a message as a consumer gets it, valid or not: what is wrong with it shows
// when it is delivered, as with a real broker. Its Queue, Attempt and failure times are set anew.
// It returns ctx's error when that has ended, and refuses nil and what no queue wants.
func (b *Broker) Send(ctx context.Context, m *inbox.Message) error {
	if m == nil {
		return errors.New("inboxtest: message is nil")
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("inboxtest: send: %w", err)
	}
	if !b.route(m) {
		return fmt.Errorf("inboxtest: no queue wants messages named %q", m.Name)
	}
	return nil
}

func (b *Broker) route(m *inbox.Message) (wanted bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, q := range b.queues {
		if slices.ContainsFunc(q.patterns, func(pattern string) bool { return matches(pattern, m.Name) }) {
			q.put(m)
			wanted = true
		}
	}
	b.changed.Broadcast()
	return wanted
}

// put puts a copy of a message at the end of the queue. The lock is held.
func (q *queue) put(m *inbox.Message) {
	msg := clone(m)
	msg.Queue, msg.Attempt, msg.Recovered, msg.Redelivered, msg.FirstFailedAt = q.name, 1, 0, false, time.Time{}
	q.ready = append(q.ready, &delivery{msg: msg})
}

func clone(m *inbox.Message) *inbox.Message {
	c := *m
	c.Body, c.Headers = bytes.Clone(m.Body), maps.Clone(m.Headers)
	return &c
}

// matches compares words between dots: * stands for one, # for any number.
func matches(pattern, name string) bool {
	return matchWords(strings.Split(pattern, "."), strings.Split(name, "."))
}

func matchWords(pattern, words []string) bool {
	switch {
	case len(pattern) == 0:
		return len(words) == 0
	case pattern[0] == "#":
		return matchWords(pattern[1:], words) || len(words) > 0 && matchWords(pattern, words[1:])
	case len(words) == 0 || pattern[0] != "*" && pattern[0] != words[0]:
		return false
	}
	return matchWords(pattern[1:], words[1:])
}

// Idle waits until no message is in any queue, waiting for a retry, or being processed. It
// returns ctx's error when that ends first. Only consumers that run make progress meanwhile.
func (b *Broker) Idle(ctx context.Context) error {
	stop := context.AfterFunc(ctx, b.wake)
	defer stop()
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.busy() {
		if ctx.Err() != nil {
			return fmt.Errorf("inboxtest: not idle: %w", ctx.Err())
		}
		b.changed.Wait()
	}
	return nil
}

func (b *Broker) busy() bool {
	for _, q := range b.queues {
		if len(q.ready)+q.waiting+q.inFlight > 0 {
			return true
		}
	}
	return false
}

// change changes queues under the lock, and lets everybody who waits look again.
func (b *Broker) change(with func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	with()
	b.changed.Broadcast()
}

func (b *Broker) wake() { b.change(func() {}) }
