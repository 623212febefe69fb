package outboxtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/internal/deadletter"
	"github.com/holdfast-go/holdfast/outbox/internal/stored"
)

// dead is a message that was given up.
type dead struct {
	driver.Message
	seq      int
	class    driver.Class
	err      string
	failedAt time.Time
}

func (d dead) letter() outbox.DeadLetter {
	return outbox.DeadLetter{
		Message: stored.Message(clone(d.Message)), Class: string(d.class), Error: d.err,
		Attempts: d.Attempts, CreatedAt: d.CreatedAt, FailedAt: d.failedAt, Fingerprint: d.fingerprint(),
	}
}

func (d dead) fingerprint() string {
	return deadletter.Fingerprint(string(d.class), d.Transport, d.Name, d.err)
}

// outlived says whether consumers may have forgotten that they have processed it.
func (d dead) outlived() bool { return time.Since(d.CreatedAt) > deadletter.Retention }

// deadLetters implements outbox.DeadLetters. Nothing keeps who changed them.
type deadLetters struct{ s *Store }

// DeadLetters returns the messages that were given up.
func (s *Store) DeadLetters() outbox.DeadLetters { return deadLetters{s} }

// selected returns those that f selects, the oldest first. The caller holds the lock.
func (d deadLetters) selected(f outbox.Filter, also func(dead) bool) []dead {
	var chosen []dead
	for _, l := range d.s.dead {
		if matches(f, l) && also(l) && (f.Limit == 0 || len(chosen) < f.Limit) {
			chosen = append(chosen, l)
		}
	}
	return chosen
}

func matches(f outbox.Filter, d dead) bool {
	return (f.IDs == nil || slices.Contains(f.IDs, d.ID)) &&
		(f.Class == "" || f.Class == string(d.class)) && (f.Name == "" || f.Name == d.Name) && (f.Key == "" || f.Key == d.Key) &&
		(f.Fingerprint == "" || f.Fingerprint == d.fingerprint()) &&
		strings.Contains(d.err, f.ErrorContains) &&
		(f.FailedAfter.IsZero() || !d.failedAt.Before(f.FailedAfter)) && (f.FailedBefore.IsZero() || d.failedAt.Before(f.FailedBefore))
}

func all(dead) bool { return true }

// check refuses what no store does.
func (d deadLetters) check(ctx context.Context, f outbox.Filter) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return deadletter.CheckFilter(f)
}

// List implements outbox.DeadLetters.
func (d deadLetters) List(ctx context.Context, f outbox.Filter) ([]outbox.DeadLetter, error) {
	if err := d.check(ctx, f); err != nil {
		return nil, err
	}
	if f.Limit == 0 {
		f.Limit = deadletter.ListLimit
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	var letters []outbox.DeadLetter
	for _, l := range d.selected(f, all) {
		letters = append(letters, l.letter())
	}
	return letters, nil
}

// Show implements outbox.DeadLetters.
func (d deadLetters) Show(ctx context.Context, id uuid.UUID) (outbox.DeadLetter, error) {
	letters, err := d.List(ctx, outbox.Filter{IDs: []uuid.UUID{id}})
	if err == nil && len(letters) == 0 {
		err = outbox.ErrNotFound
	}
	if err != nil {
		return outbox.DeadLetter{}, err
	}
	return letters[0], nil
}

// Count implements outbox.DeadLetters.
func (d deadLetters) Count(ctx context.Context, f outbox.Filter) (int, error) {
	if err := d.check(ctx, f); err != nil {
		return 0, err
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	return len(d.selected(f, all)), nil
}

// Groups implements outbox.DeadLetters.
func (d deadLetters) Groups(ctx context.Context, f outbox.Filter) ([]outbox.Group, error) {
	if err := d.check(ctx, f); err != nil {
		return nil, err
	}
	limit := cmp.Or(f.Limit, deadletter.GroupsLimit)
	f.Limit = 0
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	kinds := map[string]*outbox.Group{}
	for _, l := range d.selected(f, all) { // the oldest first
		letter := l.letter()
		letter.Body, letter.Headers = nil, nil
		g := kinds[letter.Fingerprint]
		if g == nil {
			g = &outbox.Group{Fingerprint: letter.Fingerprint, First: letter.FailedAt}
			kinds[letter.Fingerprint] = g
		}
		g.Count, g.Last, g.Sample = g.Count+1, letter.FailedAt, letter
	}
	groups := slices.SortedFunc(maps.Values(kinds), func(a, b *outbox.Group) int {
		return cmp.Or(b.Count-a.Count, strings.Compare(a.Fingerprint, b.Fingerprint))
	})
	var found []outbox.Group
	for _, g := range groups[:min(limit, len(groups))] {
		found = append(found, *g)
	}
	return found, nil
}

// Replay implements outbox.DeadLetters.
func (d deadLetters) Replay(ctx context.Context, f outbox.Filter, r outbox.Replay) (outbox.Replayed, error) {
	if err := d.check(ctx, f); err != nil {
		return outbox.Replayed{}, err
	}
	if err := deadletter.CheckReplay(r); err != nil {
		return outbox.Replayed{}, err
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	refused := func(l dead) bool { return !r.Force && l.outlived() }
	again := func(l dead) bool { return d.s.byID[l.ID] != nil }
	chosen := d.selected(f, func(l dead) bool { return !refused(l) && !again(l) })
	replayed := outbox.Replayed{
		Returned: len(chosen), Outlived: len(d.selected(f, refused)),
		Failed: len(d.selected(f, func(l dead) bool { return !refused(l) && again(l) })),
	}
	chosen, refusal := edited(chosen, r.Edit)
	replayed.Failed += replayed.Returned - len(chosen)
	replayed.Returned = len(chosen)
	if !r.DryRun {
		d.bringBack(chosen, r.PerSecond)
	}
	return replayed, errors.Join(refusal, deadletter.Outlived(replayed.Outlived))
}

// edited are letters with the bodies that edit gives them, but for those that it refuses: the error is of
// the first.
func edited(letters []dead, edit func(outbox.Message) ([]byte, error)) (all []dead, refused error) {
	if edit == nil {
		return letters, nil
	}
	for _, l := range letters {
		body, err := edit(stored.Message(clone(l.Message)))
		if err != nil {
			if refused == nil {
				refused = fmt.Errorf("outbox: message %s cannot be edited: %w", l.ID, err)
			}
			continue
		}
		l.Body = slices.Clone(body)
		all = append(all, l)
	}
	return all, refused
}

// bringBack makes messages of dead letters, in stored order and behind all others. The caller holds
// the lock.
func (d deadLetters) bringBack(letters []dead, perSecond float64) {
	slices.SortStableFunc(letters, func(a, b dead) int { return a.seq - b.seq })
	now := time.Now()
	for i, l := range letters {
		l.Attempts = 0
		e := &entry{Message: l.Message, committed: true}
		if perSecond > 0 && i > 0 {
			e.due = now.Add(time.Duration(float64(i) / perSecond * float64(time.Second)))
		}
		d.s.append(e)
	}
	d.drop(letters)
}

func (d deadLetters) drop(letters []dead) {
	d.s.dead = slices.DeleteFunc(d.s.dead, func(l dead) bool {
		return slices.ContainsFunc(letters, func(gone dead) bool { return gone.ID == l.ID })
	})
}

// Remove implements outbox.DeadLetters.
func (d deadLetters) Remove(ctx context.Context, f outbox.Filter, by, reason string) (int, error) {
	if err := d.check(ctx, f); err != nil {
		return 0, err
	}
	if err := deadletter.CheckActor(by, reason); err != nil {
		return 0, err
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	gone := d.selected(f, all)
	d.drop(gone)
	return len(gone), nil
}
