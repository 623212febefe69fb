package outboxtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/deadletter"
	"github.com/holdfast-go/holdfast/internal/outbox/stored"
	"github.com/holdfast-go/holdfast/outbox"
)

// parked implements outbox.DeadLetters and deadletter.Store for the messages that wait for a due time. It keeps no audit.
type parked struct{ s *Store }

// Parked returns the messages that wait for their first or next attempt, ordered by due time, as outboxpgx does.
func (s *Store) Parked() outbox.DeadLetters { return parked{s} }

func (e *entry) parked() outbox.DeadLetter {
	d := outbox.DeadLetter{
		Message: stored.Message(clone(e.Message)), Class: string(e.class), Error: e.err, Attempts: e.Attempts,
		CreatedAt: e.CreatedAt, DueAt: e.due, Cursor: positionOf(e).String(),
	}
	if e.class != "" {
		d.Fingerprint = dead{Message: e.Message, class: e.class, err: e.err}.fingerprint()
	}
	return d
}

// position is a position in the list of parked messages: a due time in nanoseconds, and a place in the stored order.
type position struct {
	due int64
	seq int
}

func positionOf(e *entry) position { return position{e.due.UnixNano(), e.seq} }

func (c position) String() string { return fmt.Sprintf("%d.%d", c.due, c.seq) }

func (c position) compare(other position) int {
	return cmp.Or(cmp.Compare(c.due, other.due), c.seq-other.seq)
}

// parsePosition parses a cursor; nil is before all entries.
func parsePosition(text string) (*position, error) {
	if text == "" {
		return nil, nil
	}
	due, seq, _ := strings.Cut(text, ".")
	nanos, err1 := strconv.ParseInt(due, 10, 64)
	n, err2 := strconv.Atoi(seq)
	if err1 != nil || err2 != nil {
		return nil, fmt.Errorf("%.80q is not a list cursor", text)
	}
	return &position{nanos, n}, nil
}

// selected returns the parked messages that f selects after a position, the one due first at the start. The caller holds
// the lock.
func (p parked) selected(f outbox.Filter, after *position) []*entry {
	var all []*entry
	for _, e := range p.s.entries {
		if e.committed && !e.due.IsZero() && (after == nil || positionOf(e).compare(*after) > 0) &&
			deadletter.Matches(f, e.parked(), e.ID, e.Name, e.Key) {
			all = append(all, e)
		}
	}
	slices.SortFunc(all, func(a, b *entry) int { return positionOf(a).compare(positionOf(b)) })
	if f.Limit > 0 {
		all = all[:min(len(all), f.Limit)]
	}
	return all
}

// check returns the violations of a filter that parked messages have in addition to f.Check.
func (p parked) check(ctx context.Context, f outbox.Filter) error {
	var err error
	if !f.FailedAfter.IsZero() || !f.FailedBefore.IsZero() {
		err = errors.New("Filter.FailedAfter and Filter.FailedBefore are only for dead letters")
	}
	return errors.Join(ctx.Err(), err)
}

// List implements outbox.DeadLetters.
func (p parked) List(ctx context.Context, f outbox.Filter) ([]outbox.DeadLetter, error) {
	after, err := parsePosition(f.After)
	if err := errors.Join(p.check(ctx, f), err, f.CheckList()); err != nil {
		return nil, wrap("list parked messages", err)
	}
	f.Limit = cmp.Or(f.Limit, deadletter.ListLimit)
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	var found []outbox.DeadLetter
	for _, e := range p.selected(f, after) {
		shown := e.parked()
		if !f.Whole {
			shown = withoutContent(shown)
		}
		found = append(found, shown)
	}
	return found, nil
}

// Show implements outbox.DeadLetters.
func (p parked) Show(ctx context.Context, id uuid.UUID) (outbox.DeadLetter, error) {
	found, err := p.List(ctx, outbox.Filter{IDs: []uuid.UUID{id}, Whole: true})
	switch {
	case err != nil:
		return outbox.DeadLetter{}, err
	case len(found) == 0:
		return outbox.DeadLetter{}, wrap("show message "+id.String(), outbox.ErrNotFound)
	}
	return found[0], nil
}

// Count implements outbox.DeadLetters.
func (p parked) Count(ctx context.Context, f outbox.Filter) (int, error) {
	if err := errors.Join(p.check(ctx, f), f.Check()); err != nil {
		return 0, wrap("count parked messages", err)
	}
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	return len(p.selected(f, nil)), nil
}

// Groups implements outbox.DeadLetters.
func (p parked) Groups(ctx context.Context, f outbox.Filter) ([]outbox.Group, error) {
	if err := errors.Join(p.check(ctx, f), f.Check()); err != nil {
		return nil, wrap("group parked messages", err)
	}
	most := cmp.Or(f.Limit, deadletter.GroupsLimit)
	f.Limit = 0
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	var kinds deadletter.Groups[outbox.Message]
	for _, e := range p.selected(f, nil) {
		sample := withoutContent(e.parked())
		sample.FailedAt = sample.DueAt // the times of a group are due times
		kinds.Add(sample)
	}
	groups := kinds.Largest(most)
	for i := range groups {
		groups[i].Sample.FailedAt = time.Time{}
	}
	return groups, nil
}

// Replay implements outbox.DeadLetters.
func (p parked) Replay(ctx context.Context, f outbox.Filter, r outbox.Replay) (outbox.Replayed, error) {
	if err := errors.Join(p.check(ctx, f), r.CheckWaiting()); err != nil {
		return outbox.Replayed{}, wrap("move parked messages", err)
	}
	done, err := deadletter.InSteps(ctx, p, f, r)
	return done, wrap("move parked messages", err)
}

// Remove implements outbox.DeadLetters.
func (p parked) Remove(ctx context.Context, f outbox.Filter, r outbox.Removal) (int, error) {
	if err := p.check(ctx, f); err != nil {
		return 0, wrap("remove parked messages", err)
	}
	n, err := deadletter.RemoveInSteps(ctx, p, f, r)
	return n, wrap("remove parked messages", err)
}

// ID implements deadletter.Store.
func (p parked) ID(m outbox.Message) uuid.UUID { return m.ID }

// Selected implements deadletter.Store.
func (p parked) Selected(ctx context.Context, f outbox.Filter) (ids []uuid.UUID, err error) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	for _, e := range p.selected(f, nil) {
		ids = append(ids, e.ID)
	}
	return ids, ctx.Err()
}

// Preview implements deadletter.Store.
func (p parked) Preview(ctx context.Context, f outbox.Filter, _ outbox.Replay) (outbox.Replayed, error) {
	ids, err := p.Selected(ctx, f)
	return outbox.Replayed{Returned: len(ids)}, err
}

// Returnable implements deadletter.Store.
func (p parked) Returnable(ctx context.Context, f outbox.Filter, _ outbox.Replay) ([]uuid.UUID, outbox.Replayed, error) {
	ids, err := p.Selected(ctx, f)
	return ids, outbox.Replayed{}, err
}

// Return implements deadletter.Store.
func (p parked) Return(ctx context.Context, s deadletter.Step, r outbox.Replay) (outbox.Replayed, error) {
	if err := ctx.Err(); err != nil {
		return outbox.Replayed{}, err
	}
	p.s.mu.Lock()
	chosen := p.selected(s.Filter, nil)
	slices.SortFunc(chosen, func(a, b *entry) int { return a.seq - b.seq })
	now := time.Now()
	for i, e := range chosen {
		e.due = now.Add(r.Delay + time.Duration(s.Before+i)*r.Between())
	}
	p.s.mu.Unlock()
	p.s.Wake()
	return outbox.Replayed{Returned: len(chosen)}, nil
}

// Delete implements deadletter.Store.
func (p parked) Delete(ctx context.Context, f outbox.Filter) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	p.s.mu.Lock()
	gone := p.selected(f, nil)
	for _, e := range gone {
		delete(p.s.byID, e.ID)
	}
	p.s.sweep()
	p.s.mu.Unlock()
	p.s.Wake()
	return len(gone), nil
}
