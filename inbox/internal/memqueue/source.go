package memqueue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

const maxWindow = 8000

// Options are those of a Source. The zero value works.
type Options struct {
	// Exclusive serves one session of the queue at a time, over all its sources.
	Exclusive bool
	// Split has Move store the copy only, as brokers do that cannot do both at once: the original is
	// still to be acknowledged.
	Split bool
	// Fault scripts what becomes of the source's calls. Optional.
	Fault Fault
	// CallTimeout is how long a call hangs that a fault has hang. Default: 10 s.
	CallTimeout time.Duration
}

// Source is a driver.Source of one queue.
type Source struct {
	queue   *Queue
	options Options

	running int      // guarded by the broker's lock, as all that follows
	open    *session // nil when there is none
}

var _ driver.Source = (*Source)(nil)

// Source returns a new source, as of one more process.
func (q *Queue) Source(o Options) *Source {
	o.CallTimeout = cmp.Or(o.CallTimeout, 10*time.Second)
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	q.exclusive = q.exclusive || o.Exclusive
	return &Source{queue: q, options: o}
}

// Traits implements driver.Source.
func (s *Source) Traits() driver.Traits {
	return driver.Traits{System: "memory", MaxWindow: maxWindow, MoveSettles: !s.options.Split, Exclusive: s.options.Exclusive}
}

// Open implements driver.Source.
func (s *Source) Open(ctx context.Context) (driver.Session, error) {
	what, err := s.at(ctx, Open, nil)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil { // also where it took effect: a session without an owner holds nothing
		return nil, err
	}
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	switch {
	case s.queue.missing:
		return nil, fmt.Errorf("queue %s: %w", s.queue.name, driver.ErrMissing)
	case s.open != nil:
		return nil, errors.New("a session is open already")
	}
	s.open = &session{source: s, queue: s.queue, hand: &hand{queue: s.queue, taken: map[*delivery]bool{}}}
	if what == EndSession {
		s.open.hand.lose(errFault)
	}
	return s.open, nil
}

// Run implements driver.Source: Move works while it runs.
func (s *Source) Run(ctx context.Context) {
	s.run(1)
	defer s.run(-1)
	<-ctx.Done()
}

func (s *Source) run(more int) {
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	s.running += more
	s.queue.broker.change()
}

// Ready implements driver.Source.
func (s *Source) Ready(context.Context) error {
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	if s.running == 0 {
		return fmt.Errorf("%w: Run is not running", driver.ErrUnavailable)
	}
	return nil
}

// Move implements driver.Source.
func (s *Source) Move(ctx context.Context, moves []driver.Move) []error {
	results := make([]error, len(moves))
	for i, m := range moves {
		if results[i] = s.Ready(ctx); results[i] == nil {
			results[i] = s.move(ctx, m)
		}
	}
	return results
}

func (s *Source) move(ctx context.Context, m driver.Move) error {
	d, ok := m.Delivery.(*delivery)
	if !ok || d.hand.queue != s.queue {
		return fmt.Errorf("a delivery of another source: %T", m.Delivery)
	}
	what, failed := s.at(ctx, Move, d.msg)
	if failed != nil {
		failed = fmt.Errorf("%w: %w", driver.ErrUnavailable, failed)
	}
	switch what {
	case FailBefore:
		return failed
	case Refuse:
		if m.Target != driver.ToTail {
			return fmt.Errorf("queue %s: %w", s.queue.name, driver.ErrRefused)
		}
	}
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	if !d.hand.taken[d] {
		return driver.ErrStale
	}
	if err := s.store(d, m); err != nil {
		return err
	}
	if !s.options.Split {
		d.hand.settle(d)
	}
	if what == EndSession {
		d.hand.lose(errFault)
	}
	return failed
}

// store puts the copy of a move where it belongs. The lock is held.
func (s *Source) store(d *delivery, m driver.Move) error {
	next := func() *inbox.Message {
		c := clone(d.entry.msg)
		c.Attempt, c.Recovered, c.FirstFailedAt, c.Redelivered = m.Next.Attempt, m.Next.Recovered, m.Next.FirstFailedAt, false
		c.History = append([]inbox.FailedAttempt(nil), m.Next.History...)
		return c
	}
	switch m.Target {
	case driver.ToLater:
		s.queue.later(next(), m.Delay, m.PutOff)
	case driver.ToTail:
		s.queue.append(next())
	case driver.ToDead:
		return s.queue.bury(m.Letter, d.entry.place)
	default:
		return fmt.Errorf("no such target: %d", m.Target)
	}
	return nil
}
