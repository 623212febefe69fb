package outboxtest

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
)

// lanesPerClaim leaves lanes to other relays, as outboxpgx does.
const lanesPerClaim = 4

// Claim meets outbox.Source.
func (s *Store) Claim(ctx context.Context, req outbox.ClaimRequest) (outbox.Batch, error) {
	if req.Limit < 1 || req.Lease <= 0 {
		return outbox.Batch{}, errors.New("outboxtest: claim needs a limit and a lease")
	}
	if err := ctx.Err(); err != nil {
		return outbox.Batch{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	batch := outbox.Batch{Due: s.promote(now)}
	taken := map[int]bool{}
	for _, e := range s.ready(req.Skip) {
		n := outbox.LaneOf(e.Message)
		if !taken[n] && (len(taken) == lanesPerClaim || now.Before(s.lanes[n].until)) {
			continue
		}
		if !taken[n] {
			taken[n] = true
			s.lanes[n].token++
			s.lanes[n].until = now.Add(req.Lease)
			batch.Leases = append(batch.Leases, outbox.Lease{Lane: n, Token: s.lanes[n].token})
		}
		batch.Messages = append(batch.Messages, clone(e.Message))
		if len(batch.Messages) == req.Limit {
			break
		}
	}
	batch.More = len(taken) == lanesPerClaim
	return batch, nil
}

// promote makes messages ready whose next attempt is due, and returns the time until the next one.
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

// ready returns what could be claimed if all lanes were free.
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

// Settle meets outbox.Source.
func (s *Store) Settle(ctx context.Context, b outbox.Batch, outcomes []outbox.Outcome) ([]outbox.Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	held := map[int]bool{}
	var stale []outbox.Lease
	for _, l := range b.Leases {
		if l.Lane < 0 || l.Lane >= outbox.Lanes || s.lanes[l.Lane].token != l.Token {
			stale = append(stale, l)
			continue
		}
		held[l.Lane] = true
		s.lanes[l.Lane].token++ // a batch is settled once
		s.lanes[l.Lane].until = now
	}
	for _, o := range outcomes {
		if e := s.byID[o.ID]; e != nil && held[outbox.LaneOf(e.Message)] {
			s.settle(e, o, now)
		}
	}
	s.sweep()
	return stale, nil
}

func (s *Store) settle(e *entry, o outbox.Outcome, now time.Time) {
	switch o.Verdict {
	case outbox.Published:
		e.PublishedAt = now
		s.published = append(s.published, e.Message)
		s.published = s.published[max(0, len(s.published)-keep):]
		delete(s.byID, e.ID)
	case outbox.Failed:
		e.Attempts++
		e.due = now.Add(o.Delay)
	case outbox.Dead:
		e.Attempts++
		// An id that was written again after it died: the newer message replaces the older.
		s.dead = slices.DeleteFunc(s.dead, func(d DeadLetter) bool { return d.ID == e.ID })
		s.dead = append(s.dead, DeadLetter{Message: clone(e.Message), Class: o.Class, Err: o.Err, DiedAt: now})
		delete(s.byID, e.ID)
	}
}

func clone(m outbox.Message) outbox.Message {
	m.Body = slices.Clone(m.Body)
	m.Headers = maps.Clone(m.Headers)
	m.Route.Headers = maps.Clone(m.Route.Headers)
	return m
}
