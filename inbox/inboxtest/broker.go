package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Broker is what RabbitMQ or Redis is between a relay and its consumers, in memory: queues that
// deliver at least once. It is a publisher for outbox.NewRelay. It is safe for concurrent use.
type Broker struct {
	queues *memqueue.Broker

	mu       sync.Mutex
	bindings []binding
}

// binding is a queue with the patterns of the names that it wants.
type binding struct {
	queue    *memqueue.Queue
	patterns []string
}

// NewBroker returns a Broker without queues: NewConsumer declares them.
func NewBroker() *Broker { return &Broker{queues: memqueue.NewBroker()} }

// bind has a queue get the messages of which the patterns are.
func (b *Broker) bind(queue *memqueue.Queue, patterns []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.bindings {
		if b.bindings[i].queue == queue {
			b.bindings[i].patterns = append(b.bindings[i].patterns, patterns...)
			return
		}
	}
	b.bindings = append(b.bindings, binding{queue, patterns})
}

// System implements driver.Identified of outbox.
func (*Broker) System() string { return "memory" }

// Publish implements driver.Publisher of outbox: it puts a copy of the message into every queue
// whose consumer wants messages of its name. Without any the message is unroutable.
func (b *Broker) Publish(ctx context.Context, m driver.Message, done func(error)) {
	if err := ctx.Err(); err != nil {
		done(&driver.PublishError{Class: driver.Unavailable, Err: err})
		return
	}
	err := b.route(&inbox.Message{
		ID: m.ID, Name: m.Name, Key: m.Key, Body: m.Body, ContentType: m.ContentType, Headers: m.Headers, PublishedAt: m.CreatedAt,
	})
	switch {
	case errors.Is(err, errUnwanted):
		err = &driver.PublishError{Class: driver.Unroutable, Err: err}
	case err != nil:
		err = &driver.PublishError{Class: driver.Permanent, Err: err}
	}
	done(err)
}

// Send is Publish for a message as a consumer gets it, valid or not: what is wrong with it shows
// when it is delivered, as with a real broker. Its Queue, Attempt and failures are set anew.
// It returns ctx's error when that has ended. It refuses nil, what no queue wants, and what brokers
// refuse: a body over 16 MiB, a name over 255 bytes and headers over 128 KiB.
func (b *Broker) Send(ctx context.Context, m *inbox.Message) error {
	if m == nil {
		return errors.New("inboxtest: message is nil")
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("inboxtest: send: %w", err)
	}
	return b.route(m)
}

var errUnwanted = errors.New("no queue wants messages of this name")

// route puts a copy of a message into every queue that wants it.
func (b *Broker) route(m *inbox.Message) error {
	err := fmt.Errorf("inboxtest: message named %q: %w", m.Name, errUnwanted)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, to := range b.bindings {
		if !slices.ContainsFunc(to.patterns, func(pattern string) bool { return matches(pattern, m.Name) }) {
			continue
		}
		if err = to.queue.Put(m); err != nil {
			return fmt.Errorf("inboxtest: message named %q: %w", m.Name, err)
		}
	}
	return err
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
	if err := b.queues.Idle(ctx); err != nil {
		return fmt.Errorf("inboxtest: not idle: %w", err)
	}
	return nil
}
