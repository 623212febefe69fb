package memqueue

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// session is a driver.Session.
type session struct {
	source *Source
	queue  *Queue
	hand   *hand
}

// call asks the script about a call of the session, and has it done. An error ends the session.
func (s *session) call(ctx context.Context, step Step, do func()) error {
	what, err := s.source.at(ctx, step, nil)
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	if s.hand.lost != nil {
		return s.hand.lost
	}
	if what != FailBefore {
		do()
	}
	if err != nil || what == EndSession {
		s.hand.lose(cmp.Or(err, errFault))
	}
	return err
}

// Start implements driver.Session.
func (s *session) Start(ctx context.Context, window int) error {
	if window < 1 || window > maxWindow {
		return fmt.Errorf("a window of %d, from 1 to %d are allowed", window, maxWindow)
	}
	return s.call(ctx, Start, func() { s.hand.start(window) })
}

// Stop implements driver.Session. An exclusive queue still serves no other session.
func (s *session) Stop(ctx context.Context) error {
	return s.call(ctx, Stop, func() { s.hand.window = 0 })
}

// Receive implements driver.Session.
func (s *session) Receive(ctx context.Context, most int) (ds []driver.Delivery, err error) {
	for len(ds) < most {
		d, err := s.next(ctx, len(ds) == 0)
		if d == nil {
			return ds, err
		}
		what, err := s.source.at(ctx, Receive, d.msg)
		switch {
		case err != nil: // with effect or without: it is unsettled, and no session has it
			s.lose(err)
			if len(ds) > 0 {
				return ds, nil // the next call tells
			}
			return nil, err
		case what == Lose:
			s.apply(d, Lose, nil)
			continue
		case what == EndSession:
			s.lose(errFault)
		}
		ds = append(ds, d)
	}
	return ds, nil
}

// next takes the first message of the queue. It waits for one if it is told to, and else returns nil.
func (s *session) next(ctx context.Context, wait bool) (*delivery, error) {
	b := s.queue.broker
	b.mu.Lock()
	defer b.mu.Unlock()
	for {
		if d := s.hand.take(); d != nil || !wait {
			return d, nil
		}
		if s.hand.lost != nil {
			return nil, s.hand.lost
		}
		if err := b.wait(ctx); err != nil {
			return nil, err
		}
	}
}

// Ack implements driver.Session.
func (s *session) Ack(ctx context.Context, ds []driver.Delivery, _ bool) error {
	return s.each(ctx, Ack, ds, s.hand.settle)
}

// GiveBack implements driver.Session.
func (s *session) GiveBack(ctx context.Context, ds []driver.Delivery) error {
	return s.each(ctx, GiveBack, ds, s.hand.giveBack)
}

// each settles deliveries one by one. Those that are not this session's are ErrStale, and the
// others are settled nevertheless.
func (s *session) each(ctx context.Context, step Step, ds []driver.Delivery, settle func(*delivery) bool) error {
	var stale error
	for _, one := range ds {
		d, ok := one.(*delivery)
		if !ok || d.hand != s.hand {
			stale = driver.ErrStale
			continue
		}
		what, err := s.source.at(ctx, step, d.msg)
		if !s.apply(d, what, settle) {
			stale = driver.ErrStale
		}
		if err != nil {
			s.lose(err)
			return err
		}
		if what == EndSession {
			s.lose(errFault)
		}
	}
	return stale
}

func (s *session) apply(d *delivery, what Outcome, settle func(*delivery) bool) bool {
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	switch what {
	case FailBefore:
		return true
	case Lose:
		return s.hand.giveBack(d)
	}
	return settle(d)
}

func (s *session) lose(err error) {
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	s.hand.lose(err)
}

var errClosed = errors.New("the session is closed")

// Close implements driver.Session. Where it fails the session is over all the same, as with a
// broker that notices the closed connection.
func (s *session) Close(ctx context.Context) error {
	_, err := s.source.at(ctx, Close, nil)
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	s.hand.lose(errClosed)
	if s.source.open == s {
		s.source.open = nil
	}
	return err
}
