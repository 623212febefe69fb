package outboxtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
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
	died     int // its place among all that died
	class    driver.Class
	err      string
	failedAt time.Time
}

func (d dead) letter() outbox.DeadLetter {
	return outbox.DeadLetter{
		Message: stored.Message(clone(d.Message)), Class: string(d.class), Error: d.err,
		Attempts: d.Attempts, CreatedAt: d.CreatedAt, FailedAt: d.failedAt, Fingerprint: d.fingerprint(),
		Cursor: strconv.Itoa(d.died),
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
	ids := map[uuid.UUID]bool{}
	for _, id := range f.IDs {
		ids[id] = true
	}
	var chosen []dead
	for _, l := range d.s.dead {
		if (f.IDs == nil || ids[l.ID]) && matches(f, l) && also(l) && (f.Limit == 0 || len(chosen) < f.Limit) {
			chosen = append(chosen, l)
		}
	}
	return chosen
}

// matches leaves the ids out.
func matches(f outbox.Filter, d dead) bool {
	return (f.Class == "" || f.Class == string(d.class)) && (f.Name == "" || f.Name == d.Name) && (f.Key == "" || f.Key == d.Key) &&
		(f.Fingerprint == "" || f.Fingerprint == d.fingerprint()) &&
		strings.Contains(d.err, f.ErrorContains) &&
		(f.FailedAfter.IsZero() || !d.failedAt.Before(f.FailedAfter)) && (f.FailedBefore.IsZero() || d.failedAt.Before(f.FailedBefore))
}

func all(dead) bool { return true }

// parseCursor reads the number of a place in a list; "" is before all.
func parseCursor(text string) (int, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("outboxtest: %.80q is no cursor of a list", text)
	}
	return n, nil
}

// check refuses what no store does.
func (d deadLetters) check(ctx context.Context, f outbox.Filter) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return deadletter.CheckFilter(f)
}

// List implements outbox.DeadLetters.
func (d deadLetters) List(ctx context.Context, f outbox.Filter) ([]outbox.DeadLetter, error) {
	after, err := parseCursor(f.After)
	if err := errors.Join(ctx.Err(), err, deadletter.CheckList(f)); err != nil {
		return nil, err
	}
	if f.Limit == 0 {
		f.Limit = deadletter.ListLimit
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	var letters []outbox.DeadLetter
	for _, l := range d.selected(f, func(l dead) bool { return l.died > after }) {
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
	return deadletter.Replay(ctx, d, f, r)
}

// Remove implements outbox.DeadLetters.
func (d deadLetters) Remove(ctx context.Context, f outbox.Filter, r outbox.Removal) (int, error) {
	return deadletter.Remove(ctx, d, f, r)
}

// Selected implements deadletter.Store.
func (d deadLetters) Selected(ctx context.Context, f outbox.Filter) ([]uuid.UUID, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	return idsOf(d.selected(f, all)), nil
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

// again says that the outbox holds the id of a letter. The caller holds the lock.
func (d deadLetters) again(l dead) bool { return d.s.byID[l.ID] != nil }

func idsOf(letters []dead) []uuid.UUID {
	ids := make([]uuid.UUID, len(letters))
	for i, l := range letters {
		ids[i] = l.ID
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
	letters := d.selected(s.Filter, func(l dead) bool { return !d.again(l) })
	failed := len(d.selected(s.Filter, d.again))
	edited := map[uuid.UUID][]byte{}
	for i, body := range s.Bodies {
		edited[s.Filter.IDs[i]] = body
	}
	slices.SortStableFunc(letters, func(a, b dead) int { return a.seq - b.seq })
	now := time.Now()
	for i, l := range letters {
		l.Attempts = 0
		if body, ok := edited[l.ID]; ok {
			l.Body = body
		}
		e := &entry{Message: l.Message, committed: true}
		if before := s.Before + i; r.PerSecond > 0 && before > 0 {
			e.due = now.Add(time.Duration(float64(before) / r.PerSecond * float64(time.Second)))
		}
		d.s.append(e)
	}
	d.drop(letters)
	return outbox.Replayed{Returned: len(letters), Failed: failed}, nil
}

// Delete implements deadletter.Store.
func (d deadLetters) Delete(ctx context.Context, f outbox.Filter, _ outbox.Removal) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	gone := d.selected(f, all)
	d.drop(gone)
	return len(gone), nil
}

// drop takes letters out. The caller holds the lock.
func (d deadLetters) drop(letters []dead) {
	gone := map[uuid.UUID]bool{}
	for _, l := range letters {
		gone[l.ID] = true
	}
	d.s.dead = slices.DeleteFunc(d.s.dead, func(l dead) bool { return gone[l.ID] })
}

// Waiting returns the messages that f selects.
func (s *Store) Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error) {
	limit := cmp.Or(f.Limit, deadletter.ListLimit)
	after, err := parseWaitingCursor(f.After)
	if err := errors.Join(ctx.Err(), err, deadletter.CheckFilter(outbox.Filter{Name: f.Name, Key: f.Key, Limit: limit})); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []outbox.Waiting
	for _, e := range s.entries {
		parked := !e.due.IsZero()
		if !e.committed || parked != f.Parked || f.Name != "" && f.Name != e.Name || f.Key != "" && f.Key != e.Key {
			continue
		}
		if after != nil && !after.before(e) {
			continue
		}
		found = append(found, outbox.Waiting{
			Message: stored.Message(clone(e.Message)), CreatedAt: e.CreatedAt, DueAt: e.due, Attempts: e.Attempts,
			Class: string(e.class), Error: e.err, Cursor: cursorOf(e).String(),
		})
	}
	slices.SortStableFunc(found, func(a, b outbox.Waiting) int { return a.DueAt.Compare(b.DueAt) })
	return found[:min(limit, len(found))], nil
}

// waitingCursor is a place in a list: when the message there is due, in nanoseconds, and its place in the stored order.
type waitingCursor struct {
	due int64
	seq int
}

func cursorOf(e *entry) waitingCursor { return waitingCursor{e.due.UnixNano(), e.seq} }

func (c waitingCursor) String() string { return fmt.Sprintf("%d.%d", c.due, c.seq) }

// before reports whether c is before the place of an entry.
func (c waitingCursor) before(e *entry) bool {
	other := cursorOf(e)
	return cmp.Or(cmp.Compare(c.due, other.due), c.seq-other.seq) < 0
}

// parseWaitingCursor reads a cursor; nil is before all.
func parseWaitingCursor(text string) (*waitingCursor, error) {
	if text == "" {
		return nil, nil
	}
	due, seq, _ := strings.Cut(text, ".")
	nanos, err1 := strconv.ParseInt(due, 10, 64)
	n, err2 := strconv.Atoi(seq)
	if err1 != nil || err2 != nil {
		return nil, fmt.Errorf("outboxtest: %.80q is no cursor of a list", text)
	}
	return &waitingCursor{nanos, n}, nil
}
