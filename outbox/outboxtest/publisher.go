package outboxtest

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Publisher is a driver.Publisher that confirms and records, or fails by
// script. It is safe for concurrent use.
type Publisher struct {
	mu       sync.Mutex
	latency  time.Duration
	respond  func(m driver.Message) error
	received []driver.Message
}

// NewPublisher returns a Publisher that confirms everything at once.
func NewPublisher() *Publisher { return &Publisher{} }

// Respond has fn decide the outcome of every message from now on: nil confirms
// it. fn is called by one goroutine at a time. A nil fn confirms everything.
func (p *Publisher) Respond(fn func(m driver.Message) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.respond = fn
}

// Script answers the next messages with the errors, in this order, and
// confirms what comes after them. A nil error confirms.
func (p *Publisher) Script(errs ...error) {
	errs = slices.Clone(errs)
	p.Respond(func(driver.Message) error {
		if len(errs) == 0 {
			return nil
		}
		err := errs[0]
		errs = errs[1:]
		return err
	})
}

// Latency is the time between Publish and its outcome. Zero, the default,
// means that Publish calls done before it returns.
func (p *Publisher) Latency(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.latency = d
}

// Received returns the messages that were taken, in the order of arrival, also those whose
// confirm came when nobody waited any more.
func (p *Publisher) Received() []driver.Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.received)
}

// Publish implements driver.Publisher.
func (p *Publisher) Publish(ctx context.Context, m driver.Message, done func(error)) {
	if err := ctx.Err(); err != nil {
		done(&driver.PublishError{Class: driver.Unavailable, Err: err})
		return
	}
	latency, err := p.decide(m)
	if latency == 0 {
		done(err)
		return
	}
	go func() {
		timer := time.NewTimer(latency)
		defer timer.Stop()
		select {
		case <-timer.C:
			done(err)
		case <-ctx.Done():
			done(&driver.PublishError{Class: driver.Unavailable, Err: ctx.Err()})
		}
	}()
}

func (p *Publisher) decide(m driver.Message) (time.Duration, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var err error
	if p.respond != nil {
		err = p.respond(m)
	}
	if err == nil {
		p.received = append(p.received, clone(m))
	}
	return p.latency, err
}
