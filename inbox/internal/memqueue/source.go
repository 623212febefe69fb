package memqueue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

const maxWindow = 8000

// Options configure a Source. The zero value works.
type Options struct {
	// Exclusive serves one session of the queue at a time, over all its sources.
	Exclusive bool
	// Split makes Move only store the copy, like brokers that cannot do both at once. The original must still
	// be acknowledged.
	Split bool
	// Fault scripts the outcomes of the source's calls. Optional.
	Fault Fault
	// CallTimeout is how long a call with the outcome Hang takes. Default: 10 s.
	CallTimeout time.Duration
}

// Source is a driver.Source of one queue.
type Source struct {
	queue   *Queue
	options Options

	running int      // guarded by the broker's lock, like the fields below
	open    *session // nil: no session is open
}

var _ driver.Source = (*Source)(nil)

// Source returns a new source, like that of another process.
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
	if err != nil { // even if it took effect: a session without an owner has no messages
		return nil, err
	}
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	switch {
	case s.queue.missing:
		return nil, fmt.Errorf("queue %s: %w", s.queue.name, driver.ErrMissing)
	case s.open != nil:
		return nil, errors.New("another session is open")
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
		return fmt.Errorf("the delivery belongs to another source: %T", m.Delivery)
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

// store stores the copy of a move at its target. The lock is held.
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
		return s.queue.keepDead(m.DeadLetter, d.entry.place)
	default:
		return fmt.Errorf("no such target: %d", m.Target)
	}
	return nil
}

// session is a driver.Session.
type session struct {
	source *Source
	queue  *Queue
	hand   *hand
}

// call applies the script to a call of the session, and runs do. An error ends the session.
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
		return fmt.Errorf("window %d is not from 1 to %d", window, maxWindow)
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
		case err != nil: // with or without effect: the message is unsettled, and no session has it
			s.lose(err)
			if len(ds) > 0 {
				return ds, nil // the next call returns the error
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

// next takes the first message of the queue. If there is none, it waits or returns nil.
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

// each settles deliveries one by one. Deliveries of other sessions return ErrStale, and the others are still
// settled.
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

// Close implements driver.Session. Even if it fails, the session has ended, as with a broker that notices the
// closed connection.
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

// hand has the unsettled deliveries of a session. The broker's lock guards it.
type hand struct {
	queue   *Queue
	window  int // 0: stopped
	starts  int // calls of Start
	counted int // unsettled messages since the last Start
	taken   map[*delivery]bool
	lost    error // why the session has ended
}

// delivery is one delivery of an entry.
type delivery struct {
	hand  *hand
	entry *entry
	start int
	msg   *inbox.Message
}

// Message implements driver.Delivery.
func (d *delivery) Message() *inbox.Message { return d.msg }

// start allows deliveries.
func (h *hand) start(window int) {
	h.window, h.counted = window, 0
	h.starts++
	if !slices.Contains(h.queue.hands, h) {
		h.queue.hands = append(h.queue.hands, h)
	}
	h.queue.broker.change()
}

// take takes the first message of the queue; nil if there is none for this session.
func (h *hand) take() *delivery {
	q := h.queue
	standsBy := q.exclusive && (len(q.hands) == 0 || q.hands[0] != h)
	if h.lost != nil || standsBy || len(q.ready) == 0 || h.counted >= h.window {
		return nil
	}
	e := q.ready[0]
	q.ready = q.ready[1:]
	q.unsettled++
	h.counted++
	d := &delivery{hand: h, entry: e, start: h.starts, msg: clone(e.msg)}
	h.taken[d] = true
	return d
}

// settle removes a delivery; it returns false if the delivery was removed before.
func (h *hand) settle(d *delivery) bool {
	if !h.taken[d] {
		return false
	}
	delete(h.taken, d)
	if d.start == h.starts {
		h.counted--
	}
	h.queue.unsettled--
	h.queue.broker.change()
	return true
}

// giveBack requeues a delivery; it returns false if the delivery was removed before.
func (h *hand) giveBack(d *delivery) bool {
	if !h.settle(d) {
		return false
	}
	h.queue.back(d.entry)
	return true
}

// lose ends the session: all unsettled messages are requeued in their order.
func (h *hand) lose(err error) {
	if h.lost != nil {
		return
	}
	h.lost, h.window = err, 0
	for d := range h.taken {
		h.giveBack(d)
	}
	h.queue.hands = slices.DeleteFunc(h.queue.hands, func(other *hand) bool { return other == h })
	h.queue.broker.change()
}

// Step is a step of the transport's contract at which a fault may happen.
type Step int

// The steps. Receive, Ack, GiveBack, Move and Scan have a message, the others have none.
const (
	Open Step = iota + 1
	Start
	Receive
	Ack
	GiveBack
	Move
	Stop
	Close
	Scan
)

// Outcome is the scripted outcome of a step. An error of a session's call, other than ErrStale, ends the
// session: unsettled messages are redelivered.
type Outcome int

// The outcomes.
const (
	// OK succeeds.
	OK Outcome = iota
	// FailBefore fails without an effect. A failed Move is ErrUnavailable.
	FailBefore
	// FailAfter fails although it took effect: the reply was lost.
	FailAfter
	// Hang is FailBefore after CallTimeout.
	Hang
	// EndSession succeeds, and the session is lost right after it. It applies to the session's calls.
	EndSession
	// Lose reports success without an effect: the message is redelivered. It applies to Receive, which then
	// does not return the message, and to Ack.
	Lose
	// Refuse is ErrRefused, of a Move to any target but the tail.
	Refuse
)

// Fault returns the outcome of a step. It is called from many goroutines and must not block; m is nil if the
// step has no message.
type Fault func(at Step, m *inbox.Message) Outcome

var (
	errFault = errors.New("a scripted fault")
	errHang  = errors.New("no answer in time")
)

// at applies the script to a step, and waits if the outcome is Hang.
func (s *Source) at(ctx context.Context, step Step, m *inbox.Message) (Outcome, error) {
	if s.options.Fault == nil {
		return OK, nil
	}
	switch what := s.options.Fault(step, m); what {
	case FailBefore, FailAfter:
		return what, errFault
	case Hang:
		timer := time.NewTimer(s.options.CallTimeout)
		defer timer.Stop()
		select {
		case <-timer.C:
			return FailBefore, errHang
		case <-ctx.Done():
			return FailBefore, ctx.Err()
		}
	default:
		return what, nil
	}
}
