package outboxtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/deadletter"
	"github.com/holdfast-go/holdfast/internal/outbox/stored"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// dead is a dead letter.
type dead struct {
	driver.Message
	seq      int
	died     int // its position in the order of death
	class    driver.Class
	err      string
	failedAt time.Time
}

func (d dead) shown() outbox.DeadLetter {
	return outbox.DeadLetter{
		Message: stored.Message(clone(d.Message)), Class: string(d.class), Error: d.err,
		Attempts: d.Attempts, CreatedAt: d.CreatedAt, FailedAt: d.failedAt, Fingerprint: d.fingerprint(),
		Cursor: strconv.Itoa(d.died),
	}
}

// withoutContent returns a dead letter as in a list that is not whole.
func withoutContent(d outbox.DeadLetter) outbox.DeadLetter {
	d.Message.Body, d.Message.Headers, d.Message.Route.Headers, d.Omitted = nil, nil, nil, true
	return d
}

// changing matches the parts of an error that do not change its kind: quotations, and words with a digit.
var changing = regexp.MustCompile("\"[^\"]*\"|'[^']*'|`[^`]*`|\\S*[0-9]\\S*")

func (d dead) fingerprint() string {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\n%s\n%s\n%s", d.class, d.Transport, d.Name, changing.ReplaceAllString(d.err, "#"))
	return fmt.Sprintf("%016x", h.Sum64())
}

// outlived reports whether consumers may have forgotten that they processed the message.
func (d dead) outlived() bool { return time.Since(d.CreatedAt) > deadletter.Retention }

// deadLetters implements outbox.DeadLetters and deadletter.Store. It keeps no audit.
type deadLetters struct{ s *Store }

// DeadLetters returns the dead letters of the Store.
func (s *Store) DeadLetters() outbox.DeadLetters { return deadLetters{s} }

// selected returns the dead letters that f selects, the oldest first. The caller holds the lock.
func (d deadLetters) selected(f outbox.Filter, also func(dead) bool) []dead {
	var chosen []dead
	for _, one := range d.s.dead {
		if (f.Limit == 0 || len(chosen) < f.Limit) && also(one) && deadletter.Matches(f, one.shown(), one.ID, one.Name, one.Key) {
			chosen = append(chosen, one)
		}
	}
	return chosen
}

func all(dead) bool { return true }

// parseCursor parses a position in a list; "" is before all entries.
func parseCursor(text string) (int, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("%.80q is not a list cursor", text)
	}
	return n, nil
}

// List implements outbox.DeadLetters.
func (d deadLetters) List(ctx context.Context, f outbox.Filter) ([]outbox.DeadLetter, error) {
	after, err := parseCursor(f.After)
	if err := errors.Join(ctx.Err(), err, f.CheckList()); err != nil {
		return nil, wrap("list dead letters", err)
	}
	f.Limit = cmp.Or(f.Limit, deadletter.ListLimit)
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	var found []outbox.DeadLetter
	for _, one := range d.selected(f, func(one dead) bool { return one.died > after }) {
		shown := one.shown()
		if !f.Whole {
			shown = withoutContent(shown)
		}
		found = append(found, shown)
	}
	return found, nil
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("outboxtest: %s: %w", what, err)
}

// Show implements outbox.DeadLetters.
func (d deadLetters) Show(ctx context.Context, id uuid.UUID) (outbox.DeadLetter, error) {
	found, err := d.List(ctx, outbox.Filter{IDs: []uuid.UUID{id}, Whole: true})
	switch {
	case err != nil:
		return outbox.DeadLetter{}, err
	case len(found) == 0:
		return outbox.DeadLetter{}, wrap("show message "+id.String(), outbox.ErrNotFound)
	}
	return found[0], nil
}

// Count implements outbox.DeadLetters.
func (d deadLetters) Count(ctx context.Context, f outbox.Filter) (int, error) {
	if err := errors.Join(ctx.Err(), f.Check()); err != nil {
		return 0, wrap("count dead letters", err)
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	return len(d.selected(f, all)), nil
}

// Groups implements outbox.DeadLetters.
func (d deadLetters) Groups(ctx context.Context, f outbox.Filter) ([]outbox.Group, error) {
	if err := errors.Join(ctx.Err(), f.Check()); err != nil {
		return nil, wrap("group dead letters", err)
	}
	most := cmp.Or(f.Limit, deadletter.GroupsLimit)
	f.Limit = 0
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	var kinds deadletter.Groups[outbox.Message]
	for _, one := range d.selected(f, all) {
		kinds.Add(withoutContent(one.shown()))
	}
	return kinds.Largest(most), nil
}

// Replay implements outbox.DeadLetters.
func (d deadLetters) Replay(ctx context.Context, f outbox.Filter, r outbox.Replay) (outbox.Replayed, error) {
	if err := r.CheckDead(); err != nil {
		return outbox.Replayed{}, wrap("replay dead letters", err)
	}
	done, err := deadletter.InSteps(ctx, d, f, r)
	return done, wrap("replay dead letters", err)
}

// Remove implements outbox.DeadLetters.
func (d deadLetters) Remove(ctx context.Context, f outbox.Filter, r outbox.Removal) (int, error) {
	n, err := deadletter.RemoveInSteps(ctx, d, f, r)
	return n, wrap("remove dead letters", err)
}

// ID implements deadletter.Store.
func (d deadLetters) ID(m outbox.Message) uuid.UUID { return m.ID }

// Selected implements deadletter.Store.
func (d deadLetters) Selected(ctx context.Context, f outbox.Filter) ([]uuid.UUID, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	return idsOf(d.selected(f, all)), nil
}

// Preview implements deadletter.Store.
func (d deadLetters) Preview(ctx context.Context, f outbox.Filter, r outbox.Replay) (outbox.Replayed, error) {
	ids, counts, err := d.Returnable(ctx, f, r)
	counts.Returned = len(ids)
	return counts, err
}

// Returnable implements deadletter.Store.
func (d deadLetters) Returnable(ctx context.Context, f outbox.Filter, r outbox.Replay) ([]uuid.UUID, outbox.Replayed, error) {
	if err := ctx.Err(); err != nil {
		return nil, outbox.Replayed{}, err
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	refused := func(l dead) bool { return !r.Force && l.outlived() }
	others := d.selected(f, func(l dead) bool { return !refused(l) && !d.again(l) })
	slices.SortStableFunc(others, func(a, b dead) int { return a.seq - b.seq })
	return idsOf(others), outbox.Replayed{
		Outlived: len(d.selected(f, refused)), Failed: len(d.selected(f, func(l dead) bool { return !refused(l) && d.again(l) })),
	}, nil
}

// again reports whether the outbox has the id of a dead letter. The caller holds the lock.
func (d deadLetters) again(l dead) bool { return d.s.byID[l.ID] != nil }

func idsOf(all []dead) []uuid.UUID {
	ids := make([]uuid.UUID, len(all))
	for i, one := range all {
		ids[i] = one.ID
	}
	return ids
}

// Return implements deadletter.Store.
func (d deadLetters) Return(ctx context.Context, s deadletter.Step, r outbox.Replay) (outbox.Replayed, error) {
	if err := ctx.Err(); err != nil {
		return outbox.Replayed{}, err
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	back := d.selected(s.Filter, func(l dead) bool { return !d.again(l) })
	failed := len(d.selected(s.Filter, d.again))
	edited := map[uuid.UUID][]byte{}
	for i, body := range s.Bodies {
		edited[s.Filter.IDs[i]] = body
	}
	slices.SortStableFunc(back, func(a, b dead) int { return a.seq - b.seq })
	now := time.Now()
	for i, l := range back {
		l.Attempts = 0
		if body, ok := edited[l.ID]; ok {
			l.Body = body
		}
		e := &entry{Message: l.Message, committed: true}
		if before := s.Before + i; r.PerSecond > 0 && before > 0 {
			e.due = now.Add(time.Duration(before) * r.Between())
		}
		d.s.append(e)
	}
	d.drop(back)
	return outbox.Replayed{Returned: len(back), Failed: failed}, nil
}

// Delete implements deadletter.Store.
func (d deadLetters) Delete(ctx context.Context, f outbox.Filter) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	gone := d.selected(f, all)
	d.drop(gone)
	return len(gone), nil
}

// drop removes dead letters. The caller holds the lock.
func (d deadLetters) drop(some []dead) {
	gone := map[uuid.UUID]bool{}
	for _, l := range some {
		gone[l.ID] = true
	}
	d.s.dead = slices.DeleteFunc(d.s.dead, func(l dead) bool { return gone[l.ID] })
}

// Waiting returns the messages that f selects, without their bodies. It returns an error for an invalid f.
func (s *Store) Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error) {
	limit := cmp.Or(f.Limit, deadletter.ListLimit)
	after, err := parseCursor(f.After)
	if err := errors.Join(ctx.Err(), err, outbox.Filter{Name: f.Name, Key: f.Key, Limit: limit}.Check()); err != nil {
		return nil, wrap("list messages", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []outbox.Waiting
	for _, e := range s.entries {
		if !e.committed || !e.due.IsZero() || f.Name != "" && f.Name != e.Name || f.Key != "" && f.Key != e.Key || e.seq <= after {
			continue
		}
		m := clone(e.Message)
		m.Body = nil
		found = append(found, outbox.Waiting{
			Message: stored.Message(m), CreatedAt: e.CreatedAt, Attempts: e.Attempts,
			Class: string(e.class), Error: e.err, Cursor: strconv.Itoa(e.seq),
		})
	}
	return found[:min(limit, len(found))], nil
}

// Look returns what the store knows of one message that is not published. The error is outbox.ErrNotFound for a message that
// is published, a dead letter or unknown: the store keeps no row of a published message, like one without a Retention.
func (s *Store) Look(ctx context.Context, id uuid.UUID) (driver.Known, error) {
	if err := ctx.Err(); err != nil {
		return driver.Known{}, wrap("look at a message", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.entries {
		if e.committed && e.ID == id {
			return driver.Known{Message: clone(e.Message), DueAt: e.due, Class: e.class, Error: e.err}, nil
		}
	}
	return driver.Known{}, wrap("look at message "+id.String(), outbox.ErrNotFound)
}
