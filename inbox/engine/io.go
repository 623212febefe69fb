package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// stable is the minimum length of a session after which its end counts as a first failure again.
const stable = time.Second

// reopenings are the pauses between two sessions: 0.1 s growing to 2 s, spread by half. They are short,
// because a pause may last longer than the fault.
var reopenings = backoff.Policy{Base: 100 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5, JitterAfterCap: true}

// session is one session of the source. Each delivery refers to its session, so that it is never settled on
// another one.
type session struct {
	driver.Session
	began time.Time
	over  atomic.Bool // none of its deliveries can be settled any more
	ended bool        // the loop has processed its end
}

// receiver opens sessions and receives messages, one session after the other, as the loop commands.
type receiver struct {
	cfg      *settings
	source   driver.Source
	meters   *instruments
	commands chan command
	post     func(event)
	ctx      context.Context // ends with the run
	seldom   telemetry.Seldom
	failures int
}

// run executes commands until the command leave.
func (r *receiver) run() {
	c := <-r.commands
	for c.does != leave {
		switch {
		case c.ctx.Err() != nil:
			c = <-r.commands
		case c.does != listen: // there is no session
			r.post(event{kind: stopped, serial: c.serial})
			c = <-r.commands
		default:
			c = r.serve(c)
		}
	}
	r.post(event{kind: left})
}

// serve executes commands on one session, and returns the command in force at the session's end.
func (r *receiver) serve(c command) command {
	opening, err := r.source.Open(c.ctx)
	if err != nil {
		r.lost(c, nil, err)
		return c
	}
	s := &session{Session: opening, began: time.Now()}
	r.post(event{kind: opened, session: s})
	listens := false
	for {
		if c.does == renew || c.does == leave {
			r.close(s, nil)
			return c
		}
		if listens && c.does != rest {
			if err := s.Stop(r.ctx); err != nil {
				r.lost(c, s, err)
				return c
			}
			listens = false
		}
		if c.does == stop {
			r.post(event{kind: stopped, session: s, serial: c.serial})
		}
		if c.does == listen && c.ctx.Err() == nil {
			listens = true
			if err := r.listen(s, c); err != nil {
				r.lost(c, s, err)
				return c
			}
		}
		c = <-r.commands
	}
}

// listen receives messages until the next command, or until an error ends the session.
func (r *receiver) listen(s *session, c command) error {
	if err := s.Start(r.ctx, c.window); err != nil {
		return err
	}
	r.post(event{kind: listening, session: s, serial: c.serial})
	o := &opener{receiver: r, session: s, ctx: c.ctx, failed: make(chan struct{}), slots: make(chan struct{}, openedAtOnce)}
	defer o.running.Wait()
	for c.ctx.Err() == nil {
		ds, err := s.Receive(c.ctx, c.window)
		if items := o.open(ds); len(items) > 0 {
			r.post(event{kind: received, session: s, items: items})
		}
		if err != nil && c.ctx.Err() == nil {
			close(o.failed)
			return err
		}
	}
	return nil
}

// item returns the item of a delivery.
func (r *receiver) item(s *session, d driver.Delivery, now time.Time) item {
	m := d.Message()
	if m.FirstFailedAt.After(now) { // the clock of the sender or of another process: retries would never end by age
		m.FirstFailedAt = time.Time{}
	}
	if r.cfg.DeriveID != nil && ids.Check(m.ID) != nil { // a message without an id is rejected later
		var id uuid.UUID
		r.guard("DeriveID", func() { id = r.cfg.DeriveID(m) })
		m.ID = id
	}
	it := item{d: d, m: m, session: s}
	switch {
	case !r.cfg.Ordered:
	case r.cfg.Key == nil:
		it.key = m.Key
	default:
		var key string
		r.guard("Key", func() { key = r.cfg.Key(m) })
		it.key = key
	}
	return it
}

// guard calls a user's function on a goroutine of its own, because it may panic or exit the goroutine.
func (r *receiver) guard(field string, call func()) {
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		defer func() {
			if v := recover(); v != nil {
				r.cfg.Logger.Error("inbox: function of Config panicked", slog.String("field", field), slog.Any("panic", v), slog.String("stack", string(debug.Stack())))
			}
		}()
		call()
	}()
	<-returned
}

// lost closes a failed session, if one was opened, and waits before the next attempt.
func (r *receiver) lost(c command, s *session, err error) {
	if s == nil && c.ctx.Err() != nil {
		return
	}
	r.meters.lost()
	if s != nil {
		if time.Since(s.began) > stable {
			r.failures = 0
		}
		r.close(s, err)
	} else {
		r.post(event{kind: ended, err: err})
	}
	pause := reopenings.Delay(r.failures, r.cfg.Rand())
	r.failures++
	if repeats, ok := r.seldom.Due(); ok {
		r.cfg.Logger.WarnContext(r.ctx, "no session with the broker", slog.Any("error", err),
			slog.Int("failures", r.failures), slog.Duration("again_in", pause), slog.Int("repeats", repeats))
	}
	_ = runloop.Sleep(c.ctx, pause)
}

// close ends a session. It first notifies the loop, which then settles no more deliveries of the session.
func (r *receiver) close(s *session, err error) {
	s.over.Store(true)
	r.post(event{kind: ended, session: s, err: err})
	if closing := s.Close(r.ctx); closing != nil && err == nil && !errors.Is(closing, context.Canceled) {
		r.cfg.Logger.Warn("session did not close cleanly", slog.Any("error", closing))
	}
}

// openedAtOnce is how many slow deliveries are decoded at the same time, because each occupies a processor
// core.
const openedAtOnce = 2

// opener creates items from deliveries. It decodes slow ones on goroutines of their own, so that the others
// overtake them. An ordered consumer decodes all of them in order, because the keys decide about the order.
type opener struct {
	receiver *receiver
	session  *session
	ctx      context.Context // of the command
	failed   chan struct{}   // closed when the session has failed: the broker redelivers what was not decoded
	slots    chan struct{}
	running  sync.WaitGroup
}

// open returns the items of deliveries. Items of slow deliveries are posted later.
func (o *opener) open(ds []driver.Delivery) []item {
	if len(ds) == 0 {
		return nil
	}
	items := make([]item, 0, len(ds))
	now := time.Now()
	for _, d := range ds {
		slow, ok := d.(driver.SlowDelivery)
		if ok && !o.receiver.cfg.Ordered && slow.Slow() {
			o.running.Go(func() { o.openSlow(d) })
			continue
		}
		items = append(items, o.receiver.item(o.session, d, now))
	}
	return items
}

// openSlow posts an item, or requeues the delivery if the command ends before its turn. It does nothing if the session fails
// before that.
func (o *opener) openSlow(d driver.Delivery) {
	select {
	case o.slots <- struct{}{}:
		defer func() { <-o.slots }()
	case <-o.ctx.Done():
	case <-o.failed:
	}
	select {
	case <-o.failed:
		return
	default:
	}
	if o.ctx.Err() != nil {
		_ = o.session.GiveBack(o.receiver.ctx, []driver.Delivery{d}) // if it fails, the session has failed, and the broker redelivers
		return
	}
	o.receiver.post(event{kind: received, session: o.session, items: []item{o.receiver.item(o.session, d, time.Now())}})
}

// settlement has deliveries that are settled in one call. The loop fills it, and the acker returns it.
type settlement struct {
	session     *session
	acks, backs []driver.Delivery
	outdated    int  // of the acks
	mayWait     bool // the acks; see driver.Session
}

func (s *settlement) empty() bool { return len(s.acks)+len(s.backs) == 0 }

func (s *settlement) reset() {
	clear(s.acks)
	clear(s.backs)
	*s = settlement{acks: s.acks[:0], backs: s.backs[:0]}
}

// acker acknowledges and requeues.
type acker struct {
	meters *instruments
	ctx    context.Context
	work   chan *settlement
	post   func(event)
}

func (a *acker) run() {
	for s := range a.work {
		if len(s.acks) > 0 {
			if s.session.over.Load() || s.session.Ack(a.ctx, s.acks, s.mayWait) != nil {
				a.meters.count(stale, "", len(s.acks))
			} else {
				a.meters.count(acked, "", len(s.acks)-s.outdated)
				a.meters.count(superseded, "", s.outdated)
			}
		}
		if len(s.backs) > 0 {
			as := returned
			if s.session.over.Load() || s.session.GiveBack(a.ctx, s.backs) != nil {
				as = stale
			}
			a.meters.count(as, "", len(s.backs))
		}
		a.post(event{kind: settled, settlement: s})
	}
}

// maxMoves bounds how many messages are moved in one call.
const maxMoves = 64

// removal is a set of messages of one session that are being moved.
type removal struct {
	session *session
	items   []*item
	errs    []error // one for each item, when the removal is finished
	began   time.Time
}

// mover stores copies of messages elsewhere, records that in the ledger, and then acknowledges the originals.
type mover struct {
	cfg     *settings
	source  driver.Source
	meters  *instruments
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
	if r.session.over.Load() { // the broker redelivers the original, and the copy would be a second one
		copy(r.errs, same(len(r.items), driver.ErrStale))
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
			results = same(len(moves), m.cfg.errorf("the source returned %d results for %d moves", len(results), len(moves)))
		}
		for k, err := range results {
			r.errs[at[k]] = err
		}
	}
	stopping.Wait()
	m.note(r)
	m.end(r)
}

// stop stores a dead letter that stops its key.
func (m *mover) stop(it *item) error {
	err := m.cfg.parker.Stop(m.ctx, it.deadLetter(m.cfg.Name))
	if err == nil {
		return nil
	}
	if repeats, ok := m.seldom.Due(); ok {
		m.cfg.Logger.Error("could not stop an ordering key", slog.Any("message_id", it.m.ID), slog.Any("error", err), slog.Int("repeats", repeats))
	}
	return fmt.Errorf("%w: %w", driver.ErrUnavailable, err)
}

// of returns the move of a message.
func (m *mover) of(it *item) driver.Move {
	move := driver.Move{Delivery: it.d, Target: it.order.target, Delay: it.order.delay, PutOff: !it.order.counted, Next: it.order.next}
	if it.order.target == driver.ToDead {
		move.DeadLetter = it.deadLetter(m.cfg.Name)
	}
	return move
}

// note records in the ledger which messages were moved, all at the same time.
func (m *mover) note(r *removal) {
	if m.cfg.ledger == nil {
		return
	}
	var all sync.WaitGroup
	for i, it := range r.items {
		if r.errs[i] == nil && it.order.ran {
			all.Go(func() { m.tracker.moved(it.m, it.outcome) })
		}
	}
	all.Wait()
}

// end acknowledges the originals of the moved messages, unless Move has settled them.
func (m *mover) end(r *removal) {
	var originals []driver.Delivery
	for i, it := range r.items {
		if r.errs[i] == nil && (it.order.target == toStop || it.order.target != 0 && !m.cfg.traits.MoveSettles) {
			originals = append(originals, it.d)
		}
	}
	if len(originals) > 0 {
		if err := r.session.Ack(m.ctx, originals, false); err != nil {
			m.meters.count(stale, "", len(originals))
			return
		}
	}
	for i, it := range r.items {
		switch {
		case r.errs[i] == nil && it.order.target != 0:
			m.meters.count(it.order.as, it.class(), 1)
		case errors.Is(r.errs[i], driver.ErrStale):
			m.meters.count(stale, "", 1)
		}
	}
}

// deadLetter returns the message as a dead letter of a consumer.
func (it *item) deadLetter(consumer string) inbox.DeadLetter {
	return driver.NewDeadLetter(it.m, it.outcome.failure, consumer, it.outcome.at)
}

// class returns the class of the message's failure.
func (it *item) class() string {
	if it.outcome == nil {
		return ""
	}
	return it.outcome.failure.Class
}
