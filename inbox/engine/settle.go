package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// maxMoves bounds how many messages are moved in one call.
const maxMoves = 64

// settlement is what the acker tells the broker at once. The loop fills it and gets it back.
type settlement struct {
	session     *session
	acks, backs []driver.Delivery
	leftovers   int  // of the acks
	mayWait     bool // the acks; see driver.Session
}

func (s *settlement) empty() bool { return len(s.acks)+len(s.backs) == 0 }

func (s *settlement) reset() {
	clear(s.acks)
	clear(s.backs)
	*s = settlement{acks: s.acks[:0], backs: s.backs[:0]}
}

// acker acknowledges and gives back.
type acker struct {
	signals *signals
	ctx     context.Context
	work    chan *settlement
	post    func(event)
}

func (a *acker) run() {
	for s := range a.work {
		as, class := acked, ""
		if len(s.acks) > 0 {
			if s.session.over.Load() || s.session.Ack(a.ctx, s.acks, s.mayWait) != nil {
				as = stale
			}
			a.signals.count(as, class, len(s.acks)-s.leftovers)
			if as == acked {
				as = superseded
			}
			a.signals.count(as, class, s.leftovers)
		}
		if len(s.backs) > 0 {
			as = returned
			if s.session.over.Load() || s.session.GiveBack(a.ctx, s.backs) != nil {
				as = stale
			}
			a.signals.count(as, class, len(s.backs))
		}
		a.post(event{kind: settled, settlement: s})
	}
}

// removal is a set of messages of one session on their way elsewhere.
type removal struct {
	session *session
	items   []*item
	errs    []error // one for each, when it is done
	began   time.Time
}

// mover stores copies of messages elsewhere, notes that in the ledger, and then ends the originals.
type mover struct {
	cfg     *settings
	source  driver.Source
	signals *signals
	tracker *tracker
	ctx     context.Context // not cancelled with the handlers: a message that failed in the drain is still moved
	work    chan *removal
	post    func(event)
	seldom  telemetry.Seldom
}

func (m *mover) run() {
	for r := range m.work {
		m.move(r)
		m.post(event{kind: moved, removal: r})
	}
}

func (m *mover) move(r *removal) {
	r.errs = make([]error, len(r.items))
	if r.session.over.Load() { // the copy would be a second one: the broker delivers the original again
		for i := range r.errs {
			r.errs[i] = driver.ErrStale
		}
		return
	}
	var moves []driver.Move
	var at []int
	var stopping sync.WaitGroup
	for i, it := range r.items {
		switch {
		case it.order.target == toStop:
			stopping.Go(func() { r.errs[i] = m.stop(it) })
		case it.order.target != 0:
			moves, at = append(moves, m.of(it)), append(at, i)
		}
	}
	if len(moves) > 0 {
		results := m.source.Move(m.ctx, moves)
		if len(results) != len(moves) {
			results = same(len(moves), m.cfg.errorf("the source gave %d results for %d moves", len(results), len(moves)))
		}
		for k, err := range results {
			r.errs[at[k]] = err
		}
	}
	stopping.Wait()
	m.note(r)
	m.end(r)
}

// stop has a dead letter stop its key.
func (m *mover) stop(it *item) error {
	err := m.cfg.parker.Stop(m.ctx, it.letter(m.cfg.Name))
	if err == nil {
		return nil
	}
	if repeats, ok := m.seldom.Due(); ok {
		m.cfg.Logger.Error("could not stop an ordering key", slog.Any("message_id", it.m.ID), slog.Any("error", err), slog.Int("repeats", repeats))
	}
	return fmt.Errorf("%w: %w", driver.ErrUnavailable, err)
}

// of is the move of a message.
func (m *mover) of(it *item) driver.Move {
	move := driver.Move{Delivery: it.d, Target: it.order.target, Delay: it.order.delay, PutOff: !it.order.counted, Next: it.order.next}
	if it.order.target == driver.ToDead {
		move.Letter = it.letter(m.cfg.Name)
	}
	return move
}

// note has the ledger know of those that were moved, all at the same time.
func (m *mover) note(r *removal) {
	if m.cfg.ledger == nil {
		return
	}
	var all sync.WaitGroup
	for i, it := range r.items {
		if r.errs[i] == nil && it.order.ran {
			all.Go(func() { m.tracker.moved(it.m, it.fate) })
		}
	}
	all.Wait()
}

// end acknowledges the originals of those that were moved.
func (m *mover) end(r *removal) {
	var originals []driver.Delivery
	for i, it := range r.items {
		if r.errs[i] == nil && m.leaves(it) {
			originals = append(originals, it.d)
		}
	}
	if len(originals) > 0 {
		if err := r.session.Ack(m.ctx, originals, false); err != nil {
			m.signals.count(stale, "", len(originals))
			return
		}
	}
	for i, it := range r.items {
		switch {
		case r.errs[i] == nil && it.order.target != 0:
			m.signals.count(it.order.outcome, it.class(), 1)
		case errors.Is(r.errs[i], driver.ErrStale):
			m.signals.count(stale, "", 1)
		}
	}
}

// leaves reports whether a message that is stored elsewhere is still to be ended where it came from.
func (m *mover) leaves(it *item) bool {
	return it.order.target == toStop || it.order.target != 0 && !m.cfg.traits.MoveSettles
}

// letter is the message as a dead letter of a consumer.
func (it *item) letter(consumer string) inbox.DeadLetter {
	return driver.NewDeadLetter(it.m, it.fate.failure, consumer, it.fate.at)
}

// class is that of the message's failure.
func (it *item) class() string {
	if it.fate == nil {
		return ""
	}
	return it.fate.failure.Class
}
