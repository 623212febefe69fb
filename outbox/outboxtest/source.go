package outboxtest

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// lanesPerClaim leaves lanes for other relays, like outboxpgx.
const lanesPerClaim = 4

// Claim implements driver.Source.
func (s *Store) Claim(ctx context.Context, req driver.Claim) (driver.Batch, error) {
	if req.Limit < 1 || req.Lease <= 0 {
		return driver.Batch{}, errors.New("outboxtest: claim: Limit and Lease must be more than 0")
	}
	if err := ctx.Err(); err != nil {
		return driver.Batch{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	batch := driver.Batch{Due: soonest(s.promote(now), s.leaseEnds(now))}
	if !s.pause.Since.IsZero() {
		return batch, nil
	}
	ready := s.ready(req.Skip)
	sizes := map[int]int{} // the remaining share of each lane
	for _, n := range s.choose(ready, req.Alone, &batch, now) {
		sizes[n] = s.lanes[n].lease(n, req, now, ready)
		batch.Leases = append(batch.Leases, driver.Lease{Lane: n, Token: s.lanes[n].token})
	}
	for _, e := range ready {
		n := driver.LaneOf(e.Message)
		if sizes[n] == 0 || len(batch.Messages) == req.Limit {
			continue
		}
		sizes[n]--
		batch.Messages = append(batch.Messages, clone(e.Message))
	}
	if l := batch.Leases; len(l) == 1 && s.lanes[l[0].Lane].single() {
		batch.Unsettled = s.lanes[l[0].Lane].count(batch.Messages[0].ID)
	}
	batch.More = len(batch.Leases) == lanesPerClaim
	return batch, nil
}

// choose returns the lanes to lease: the first free ones with ready messages. If the relay is alone and there are
// doubtful lanes, it returns one of these.
func (s *Store) choose(ready []*entry, alone bool, batch *driver.Batch, now time.Time) []int {
	var sound, doubtful []int
	for _, e := range ready {
		n := driver.LaneOf(e.Message)
		l := &s.lanes[n]
		switch {
		case slices.Contains(sound, n) || slices.Contains(doubtful, n) || now.Before(l.until):
		case l.doubtful():
			doubtful = append(doubtful, n)
		default:
			sound = append(sound, n)
		}
	}
	batch.Suspect = len(doubtful) > 0
	if alone && len(doubtful) > 0 {
		return slices.SortedFunc(slices.Values(doubtful), func(a, b int) int { return s.lanes[a].until.Compare(s.lanes[b].until) })[:1]
	}
	return sound[:min(len(sound), lanesPerClaim)]
}

// lost reports whether the last claim of a free lane was not settled.
func (l *lane) lost() bool { return !l.until.IsZero() }

func (l *lane) doubtful() bool { return l.lost() || l.suspect > 0 }

// single reports whether the lane returns one message at a time.
func (l *lane) single() bool { return l.suspect > 0 && l.batch == 1 }

// lease leases lane n, which is free, and returns the maximum number of its messages.
func (l *lane) lease(n int, req driver.Claim, now time.Time, ready []*entry) int {
	switch {
	case l.lost():
		if l.batch == 1 {
			l.losses++
		}
		l.suspect = 0
		left := l.batch
		for _, e := range ready {
			if left > 0 && driver.LaneOf(e.Message) == n {
				l.suspect = e.seq
				left--
			}
		}
		l.batch = max(1, l.batch/8)
	case l.suspect == 0:
		l.batch = req.Limit
	}
	l.token++
	l.until = now.Add(req.Lease)
	return l.batch
}

// count returns the number of lost claims of this message alone.
func (l *lane) count(id uuid.UUID) int {
	if l.alone != id {
		l.alone, l.losses = id, 0
	}
	return l.losses
}

// promote makes due messages ready, and returns the time until the next message is due.
func (s *Store) promote(now time.Time) (next time.Duration) {
	for _, e := range s.entries {
		wait := e.due.Sub(now)
		switch {
		case e.due.IsZero():
		case wait <= 0:
			e.due = time.Time{}
		case next == 0 || wait < next:
			next = wait
		}
	}
	return next
}

// leaseEnds returns the time until the first lease ends; 0 means that there is none.
func (s *Store) leaseEnds(now time.Time) (next time.Duration) {
	for _, l := range s.lanes {
		next = soonest(next, max(0, l.until.Sub(now)))
	}
	return next
}

// soonest returns the shorter of two times that are not 0.
func soonest(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// ready returns the messages that could be claimed if all lanes were free.
func (s *Store) ready(skip []string) []*entry {
	held := map[string]bool{}
	var ready []*entry
	for _, e := range s.entries {
		switch {
		case !e.committed || held[e.Key]:
		case !e.due.IsZero():
			held[e.Key] = e.Key != ""
		case !slices.Contains(skip, e.Transport):
			ready = append(ready, e)
		}
	}
	return ready
}

// Renew implements driver.Source.
func (s *Store) Renew(ctx context.Context, leases []driver.Lease, ttl time.Duration) (stale []driver.Lease, err error) {
	if ttl <= 0 {
		return nil, errors.New("outboxtest: renew: ttl must be more than 0")
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range leases {
		if s.holds(l) {
			s.lanes[l.Lane].until = time.Now().Add(ttl)
		} else {
			stale = append(stale, l)
		}
	}
	return stale, nil
}

// holds reports whether a claim still has its lane.
func (s *Store) holds(l driver.Lease) bool {
	if l.Lane < 0 || l.Lane >= driver.Lanes {
		return false
	}
	lane := s.lanes[l.Lane]
	return !lane.until.IsZero() && lane.token == l.Token
}

// Settle implements driver.Source.
func (s *Store) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) (driver.Settled, error) {
	if err := ctx.Err(); err != nil {
		return driver.Settled{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	held := map[int]bool{}
	var settled driver.Settled
	for _, l := range b.Leases {
		if !s.holds(l) {
			settled.Stale = append(settled.Stale, l)
			continue
		}
		held[l.Lane] = true
		s.lanes[l.Lane].token++ // a batch can be settled only once
		s.lanes[l.Lane].until = time.Time{}
		s.lanes[l.Lane].losses = 0
	}
	for _, o := range outcomes {
		if e := s.byID[o.ID]; e != nil && held[driver.LaneOf(e.Message)] {
			s.settle(e, o, now)
		}
	}
	s.sweep()
	s.acquit(held)
	settled.More = slices.ContainsFunc(s.ready(nil), func(e *entry) bool {
		return slices.ContainsFunc(b.Leases, func(l driver.Lease) bool { return l.Lane == driver.LaneOf(e.Message) })
	})
	return settled, nil
}

// acquit clears the suspicion of lanes whose suspect messages are settled, even those that claims have skipped.
func (s *Store) acquit(lanes map[int]bool) {
	first := map[int]int{}
	for _, e := range s.ready(nil) {
		if n := driver.LaneOf(e.Message); first[n] == 0 {
			first[n] = e.seq
		}
	}
	for n := range lanes {
		if first[n] == 0 || first[n] > s.lanes[n].suspect {
			s.lanes[n].suspect = 0
		}
	}
}

func (s *Store) settle(e *entry, o driver.Settlement, now time.Time) {
	switch o.Verdict {
	case driver.Published:
		s.published = append(s.published, e.Message)
		s.published = s.published[max(0, len(s.published)-keep):]
		delete(s.byID, e.ID)
	case driver.Failed:
		e.Attempts++
		e.due, e.class, e.err = now.Add(o.Delay), o.Class, o.Err
	case driver.Dead:
		e.Attempts++
		// If an id was written again after its message died, the newer message replaces the older one.
		s.dead = slices.DeleteFunc(s.dead, func(d dead) bool { return d.ID == e.ID })
		s.died++
		s.dead = append(s.dead, dead{Message: clone(e.Message), seq: e.seq, died: s.died, class: o.Class, err: o.Err, failedAt: now})
		delete(s.byID, e.ID)
	}
}

func clone(m driver.Message) driver.Message {
	m.Body = slices.Clone(m.Body)
	m.Headers = maps.Clone(m.Headers)
	m.RouteHeaders = maps.Clone(m.RouteHeaders)
	return m
}

// relays are the relays that run on one Store.
type relays struct {
	mu   sync.Mutex
	list []*relay
}

type relay struct{ wake func() bool }

// Background implements driver.Background: it wakes the relay when it starts, and after commits until ctx ends. It
// has nothing to listen to and nothing to prune.
func (s *Store) Background(ctx context.Context, wake func() bool) {
	joined := &relay{wake}
	s.relays.change(func(list []*relay) []*relay { return append(list, joined) })
	wake() // for commits since the relay's first poll
	<-ctx.Done()
	s.relays.change(func(list []*relay) []*relay {
		return slices.DeleteFunc(list, func(other *relay) bool { return other == joined })
	})
}

func (r *relays) change(fn func([]*relay) []*relay) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = fn(slices.Clone(r.list))
}

// Hears implements driver.Hearing. It returns true, because every commit wakes a relay.
func (s *Store) Hears() bool { return true }

// Wake makes a relay on the Store poll now. Write calls it after each commit.
func (s *Store) Wake() {
	s.relays.mu.Lock()
	list := s.relays.list // never changed in place
	s.relays.mu.Unlock()
	for _, r := range list {
		if r.wake() {
			return
		}
	}
}

// Publisher is a driver.Publisher that confirms and records messages, or fails by script. It is safe for concurrent
// use.
type Publisher struct {
	mu       sync.Mutex
	latency  time.Duration
	respond  func(m driver.Message) error
	received []driver.Message
}

// NewPublisher returns a Publisher that confirms every message immediately.
func NewPublisher() *Publisher { return &Publisher{} }

// Respond sets a function that returns the outcome of every message from now on; nil confirms. Calls of fn do not
// overlap. A nil fn confirms everything.
func (p *Publisher) Respond(fn func(m driver.Message) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.respond = fn
}

// Script returns errs as the outcomes of the next messages, in this order, and confirms all messages after them. A
// nil error confirms.
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

// Latency sets the time between Publish and its outcome. Zero, the default, means that Publish calls done before it
// returns.
func (p *Publisher) Latency(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.latency = d
}

// Received returns the accepted messages in order of arrival, including those whose confirm came after ctx had ended.
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
