// Package lanes records the relays of an outbox, and accepts the runs that lanes.pml of internal/lab/models allows. A
// lane has one holder at a time. A message of a key is published after the one before it has an outcome, and only
// published or rejected messages go.
package lanes

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/trace"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// The transitions, with their names in lanes.pml.
const (
	commit  = "commit"
	claim   = "claim"
	publish = "publish"
	confirm = "confirm"
	renew   = "renew"
	settle  = "settle"
	expire  = "expire"
)

// Transitions are the names of the transitions. The end of a lease is no call: lane.free and round.over have it.
var Transitions = []string{commit, claim, publish, confirm, renew, settle, expire}

// lane is the state of a lane. Steps copy it.
type lane struct {
	token  int64           // of the holder; 0: none
	newest int64           // of the last claim
	until  time.Time       // the lease does not end before
	rounds map[int64]round // by token: the claims that their relay has not settled
	rows   []row           // committed, in order, and not gone
	gone   map[uuid.UUID]bool
}

type row struct {
	id  uuid.UUID
	key string
}

// round is a batch of one relay, as far as it belongs to the lane.
type round struct {
	rows     []row
	outcomes map[uuid.UUID]outcome
	until    time.Time // the relay knows of a lease until then
}

type outcome int

const (
	sent outcome = iota + 1
	confirmed
	rejected
)

func (r row) String() string { return r.key + "/" + r.id.String() }

func (r round) String() string { return fmt.Sprint(r.rows, " with outcomes ", r.outcomes) }

func (l lane) String() string {
	return fmt.Sprintf("a lane held by %d, with rounds %v and rows %v", l.token, l.rounds, l.rows)
}

func (l lane) clone() lane {
	l.rounds, l.gone = maps.Clone(l.rounds), maps.Clone(l.gone)
	if l.rounds == nil {
		l.rounds, l.gone = map[int64]round{}, map[uuid.UUID]bool{}
	}
	return l
}

// free reports whether a claim at that time may take the lane: it has no holder, or the lease has expired.
func (l lane) free(at time.Time) bool { return l.token == 0 || over(l.until, at) }

// over reports whether a lease may have expired. Servers round the length of a lease to milliseconds.
func over(until, at time.Time) bool { return !at.Before(until.Add(-2 * time.Millisecond)) }

func (l lane) committed(rows []row) []lane {
	l = l.clone()
	for _, r := range rows {
		delete(l.gone, r.id)
	}
	l.rows = slices.Concat(l.rows, rows)
	return []lane{l}
}

// claimed takes the lane. The rows of a key must be the first ones that are left of it. If strict, each row must have
// been committed.
func (l lane) claimed(token int64, rows []row, from, to time.Time, ttl time.Duration, strict bool) []lane {
	if _, used := l.rounds[token]; used || token == l.newest || !l.free(to) {
		return nil
	}
	taken := map[string]int{}
	for _, r := range rows {
		if l.gone[r.id] || strict && !slices.Contains(l.rows, r) {
			return nil
		}
		if r.key == "" || !slices.Contains(l.rows, r) {
			continue
		}
		of := slices.DeleteFunc(slices.Clone(l.rows), func(o row) bool { return o.key != r.key })
		if of[taken[r.key]] != r {
			return nil
		}
		taken[r.key]++
	}
	l = l.clone()
	l.token, l.newest, l.until = token, token, from.Add(ttl)
	l.rounds[token] = round{rows: rows, until: l.until}
	return []lane{l}
}

// claimedUnseen is a claim without an answer, of a lane whose lease has expired: the holder has lost it, and nobody knows
// the new token. Its relay releases the lane later.
func (l lane) claimedUnseen(at time.Time) []lane {
	if l.token == 0 || !l.free(at) {
		return nil
	}
	l.token = 0
	return []lane{l}
}

func (l lane) renewed(token int64, stale bool, from time.Time, ttl time.Duration) []lane {
	if stale != (token != l.token) {
		return nil
	}
	if stale {
		return []lane{l}
	}
	l = l.clone()
	l.until = from.Add(ttl)
	if r, ok := l.rounds[token]; ok {
		r.until = l.until
		l.rounds[token] = r
	}
	return []lane{l}
}

// published sends a message of one of the relay's rounds. The messages before it of its key have an outcome, and the
// round has the lane, or its lease has expired without its knowledge.
func (l lane) published(tokens []int64, id uuid.UUID, at time.Time) (after []lane) {
	for _, token := range tokens {
		r, running := l.rounds[token]
		if !running || r.outcomes[id] != 0 || token != l.newest && !over(r.until, at) || !r.turn(id) {
			continue
		}
		after = append(after, l.with(token, id, sent))
	}
	return after
}

// turn reports whether the messages before id of its key have outcomes.
func (r round) turn(id uuid.UUID) bool {
	at := slices.IndexFunc(r.rows, func(o row) bool { return o.id == id })
	if at < 0 {
		return false
	}
	return r.rows[at].key == "" || !slices.ContainsFunc(r.rows[:at], func(o row) bool {
		return o.key == r.rows[at].key && r.outcomes[o.id] != confirmed && r.outcomes[o.id] != rejected
	})
}

func (l lane) with(token int64, id uuid.UUID, o outcome) lane {
	l = l.clone()
	r := l.rounds[token]
	r.outcomes = maps.Clone(r.outcomes)
	if r.outcomes == nil {
		r.outcomes = map[uuid.UUID]outcome{}
	}
	r.outcomes[id] = o
	l.rounds[token] = r
	return l
}

// answered is the answer of the broker. It may come after the round has given up.
func (l lane) answered(tokens []int64, id uuid.UUID, o outcome) (after []lane) {
	for _, token := range tokens {
		if l.rounds[token].outcomes[id] == sent {
			after = append(after, l.with(token, id, o))
		}
	}
	if after == nil {
		return []lane{l}
	}
	return after
}

// settled ends a round. If the round still has the lane, its published and dead messages go and the lane is free. If
// the relay is recorded, messages settled as published must be confirmed.
func (l lane) settled(token int64, settlements []driver.Settlement, stale, recorded bool) []lane {
	r, running := l.rounds[token]
	if stale != (token != l.token) || !stale && !running {
		return nil
	}
	l = l.clone()
	delete(l.rounds, token)
	if stale {
		return []lane{l}
	}
	for _, s := range settlements {
		if !slices.ContainsFunc(r.rows, func(o row) bool { return o.id == s.ID }) {
			continue
		}
		if recorded && s.Verdict == driver.Published && r.outcomes[s.ID] != confirmed {
			return nil
		}
		if s.Verdict != driver.Failed {
			l.gone[s.ID] = true
			l.rows = slices.DeleteFunc(slices.Clone(l.rows), func(o row) bool { return o.id == s.ID })
		}
	}
	l.token = 0
	return []lane{l}
}

// Log is the run of all relays of a store.
type Log struct {
	trace  *trace.Log[lane]
	strict bool
}

// New returns an empty Log. If strict, all commits are recorded: each claimed message must be one of them.
func New(strict bool) *Log { return &Log{trace.New[lane](Transitions...), strict} }

// Check returns an error if lanes.pml does not allow the run. If the Log is strict, no message may be left.
func (l *Log) Check() error {
	return l.trace.Check(lane{}, func(end lane) bool { return !l.strict || len(end.rows) == 0 && end.token == 0 })
}

// Counts returns how many calls of each transition were recorded.
func (l *Log) Counts() map[string]int { return l.trace.Counts() }

// Commit records what tx, a transaction, has written when it has committed. Each attempt of tx calls begin first, and
// wrote for its messages with ids.
func (l *Log) Commit(tx func(begin func(), wrote func(...driver.Message)) error) error {
	var msgs []driver.Message
	from := l.trace.Now()
	err := tx(func() { msgs = nil }, func(more ...driver.Message) { msgs = append(msgs, more...) })
	if err != nil {
		return err
	}
	rows := map[int][]row{}
	for _, m := range msgs {
		rows[driver.LaneOf(m)] = append(rows[driver.LaneOf(m)], row{m.ID, m.Key})
	}
	for i, of := range rows {
		l.trace.Add(nameOf(i), commit, fmt.Sprint(of), from, func(s lane) []lane { return s.committed(of) })
	}
	return nil
}

func nameOf(lane int) string { return fmt.Sprint("lane ", lane) }

// full are the interfaces of the stores that a relay uses; others are hidden by a recorder.
type full interface {
	driver.Source
	driver.Measured
	driver.Pausable
	driver.Background
	driver.Hearing
}

// Process is one relay, or one caller of a store.
type Process struct {
	log      *Log
	recorded bool // the Publisher is recorded, too

	mu     sync.Mutex
	tokens map[uuid.UUID][]int64 // of the claims of a message
}

// Process returns a recorder.
func (l *Log) Process() *Process { return &Process{log: l, tokens: map[uuid.UUID][]int64{}} }

// Source returns s with a record of its calls.
func (p *Process) Source(s driver.Source) driver.Source {
	if s, ok := s.(full); ok {
		return struct {
			*source
			measured
		}{&source{s, p}, s}
	}
	return &source{s, p}
}

type measured interface {
	driver.Measured
	driver.Pausable
	driver.Background
	driver.Hearing
}

type source struct {
	inner driver.Source
	p     *Process
}

func (s *source) Claim(ctx context.Context, c driver.Claim) (driver.Batch, error) {
	log, start := s.p.log, time.Now()
	from := log.trace.Now()
	b, err := s.inner.Claim(ctx, c)
	end := time.Now()
	if err != nil && c.Limit > 0 && c.Lease > 0 {
		for i := range driver.Lanes {
			log.trace.AddOpen(nameOf(i), claim, "without an answer", from, func(l lane) []lane { return l.claimedUnseen(end) })
		}
	}
	rows := map[int][]row{}
	s.p.mu.Lock()
	for _, m := range b.Messages {
		i := driver.LaneOf(m)
		rows[i] = append(rows[i], row{m.ID, m.Key})
		for _, lease := range b.Leases {
			if lease.Lane == i {
				s.p.tokens[m.ID] = append(s.p.tokens[m.ID], lease.Token)
			}
		}
	}
	s.p.mu.Unlock()
	for _, lease := range b.Leases {
		log.trace.Add(nameOf(lease.Lane), claim, fmt.Sprint(lease.Token, rows[lease.Lane]), from, func(l lane) []lane {
			return l.claimed(lease.Token, rows[lease.Lane], start, end, c.Lease, log.strict)
		})
	}
	return b, err
}

func (s *source) Renew(ctx context.Context, leases []driver.Lease, ttl time.Duration) ([]driver.Lease, error) {
	log, start := s.p.log, time.Now()
	from := log.trace.Now()
	stale, err := s.inner.Renew(ctx, leases, ttl)
	for _, lease := range leases {
		if err != nil {
			log.trace.AddOpen(nameOf(lease.Lane), renew, "without an answer", from, func(l lane) []lane {
				return l.renewed(lease.Token, false, start, ttl)
			})
			continue
		}
		lost := slices.Contains(stale, lease)
		log.trace.Add(nameOf(lease.Lane), renew, fmt.Sprint(lease.Token, ", stale ", lost), from, func(l lane) []lane {
			return l.renewed(lease.Token, lost, start, ttl)
		})
	}
	return stale, err
}

func (s *source) Settle(ctx context.Context, b driver.Batch, settlements []driver.Settlement) (driver.Settled, error) {
	log := s.p.log
	from := log.trace.Now()
	settled, err := s.inner.Settle(ctx, b, settlements)
	for _, lease := range b.Leases {
		if err != nil {
			log.trace.AddOpen(nameOf(lease.Lane), settle, "without an answer", from, func(l lane) []lane {
				return l.settled(lease.Token, settlements, false, s.p.recorded)
			})
			continue
		}
		lost := slices.Contains(settled.Stale, lease)
		log.trace.Add(nameOf(lease.Lane), settle, fmt.Sprint(lease.Token, ", stale ", lost), from, func(l lane) []lane {
			return l.settled(lease.Token, settlements, lost, s.p.recorded)
		})
	}
	return settled, err
}

// Publisher returns to with a record of its messages and confirms. Call it before the Source is used.
func (p *Process) Publisher(to driver.Publisher) driver.Publisher {
	p.recorded = true
	return &publisher{to, p}
}

type publisher struct {
	inner driver.Publisher
	p     *Process
}

func (p *publisher) Publish(ctx context.Context, m driver.Message, done func(error)) {
	log, at, part := p.p.log.trace, time.Now(), nameOf(driver.LaneOf(m))
	p.p.mu.Lock()
	tokens := slices.Clone(p.p.tokens[m.ID])
	p.p.mu.Unlock()
	log.Add(part, publish, m.ID.String(), log.Now(), func(l lane) []lane { return l.published(tokens, m.ID, at) })
	p.inner.Publish(ctx, m, func(err error) {
		o := confirmed
		if err != nil {
			o = rejected
		}
		log.Add(part, confirm, fmt.Sprint(m.ID, ", error ", err), log.Now(), func(l lane) []lane { return l.answered(tokens, m.ID, o) })
		done(err)
	})
}
