package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/actor"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// defaultListed is how many dead letters List returns where nothing else is asked for, as in outbox.
const defaultListed = 100

// listBytes bounds the bodies and headers of one List together, as in outbox.
const listBytes = 32 << 20

// NewDeadLetters makes the dead letters that users work with of those that a transport keeps.
// Retention is how long the consumer remembers what it has processed; replays of what is older are
// refused. Who has changed dead letters, and why, goes to the logger.
func NewDeadLetters(letters DeadLetters, retention time.Duration, logger *slog.Logger) inbox.DeadLetters {
	return &deadLetters{letters, retention, logger}
}

// deadLetters implements inbox.DeadLetters.
type deadLetters struct {
	letters   DeadLetters
	retention time.Duration
	logger    *slog.Logger
}

// List implements inbox.DeadLetters.
func (l *deadLetters) List(ctx context.Context, filter inbox.Filter) ([]inbox.DeadLetter, error) {
	if filter.Limit == 0 {
		filter.Limit = defaultListed
	}
	var found []inbox.DeadLetter
	left := 0
	if filter.Whole {
		left = listBytes
	}
	err := l.look(ctx, filter, func(dead inbox.DeadLetter) {
		if left -= contentBytes(dead); left < 0 {
			dead = withoutContent(dead)
		}
		found = append(found, dead)
	})
	return found, wrap("list", err)
}

// contentBytes is at least 1.
func contentBytes(dead inbox.DeadLetter) int {
	n := 1 + len(dead.Message.Body)
	for name, value := range dead.Message.Headers {
		n += len(name) + len(value)
	}
	return n
}

// withoutContent is a letter without what may be large: a hundred bodies are more than a gigabyte.
func withoutContent(dead inbox.DeadLetter) inbox.DeadLetter {
	dead.Message.Body, dead.Message.Headers, dead.Omitted = nil, nil, true
	return dead
}

// Show implements inbox.DeadLetters. Of several with one id it returns the latest.
func (l *deadLetters) Show(ctx context.Context, id uuid.UUID) (inbox.DeadLetter, error) {
	var latest *inbox.DeadLetter
	err := l.look(ctx, inbox.Filter{IDs: []uuid.UUID{id}}, func(dead inbox.DeadLetter) {
		if latest == nil || dead.FailedAt.After(latest.FailedAt) {
			latest = &dead
		}
	})
	switch {
	case err != nil:
		return inbox.DeadLetter{}, wrap("show", err)
	case latest == nil:
		return inbox.DeadLetter{}, inbox.ErrNotFound
	}
	return *latest, nil
}

// Count implements inbox.DeadLetters.
func (l *deadLetters) Count(ctx context.Context, filter inbox.Filter) (n int, err error) {
	err = l.look(ctx, filter, func(inbox.DeadLetter) { n++ })
	return n, wrap("count", err)
}

// Groups implements inbox.DeadLetters.
func (l *deadLetters) Groups(ctx context.Context, filter inbox.Filter) ([]inbox.Group, error) {
	if err := checkFilter(filter); err != nil {
		return nil, wrap("group", err)
	}
	most := filter.Limit
	filter.Limit = 0 // it is one of groups
	var g groups
	err := l.look(ctx, filter, g.add)
	return g.largest(most), wrap("group", err)
}

// Remove implements inbox.DeadLetters.
func (l *deadLetters) Remove(ctx context.Context, filter inbox.Filter, r inbox.Removal) (n int, err error) {
	if err := actor.Check("inbox: Removal.By", "inbox: Removal.Reason", r.By, r.Reason); err != nil {
		return 0, wrap("remove", err)
	}
	var refused error
	err = l.each(ctx, &walk{
		filter: filter,
		visit: func(*inbox.DeadLetter) (Outcome, bool, error) {
			n++
			if r.Progress != nil {
				r.Progress(n)
			}
			return Drop, true, nil
		},
		failed: func(_ inbox.DeadLetter, why error) {
			n--
			refused = cmp.Or(refused, why)
		},
	})
	err = errors.Join(err, refused)
	l.audit(ctx, "dead letters removed", r.By, r.Reason, filter, err, slog.Int("removed", n))
	return n, wrap("remove", err)
}

// Replay implements inbox.DeadLetters. The error names the first that could not be returned, and
// counts those too old for it.
func (l *deadLetters) Replay(ctx context.Context, filter inbox.Filter, how inbox.Replay) (inbox.Replayed, error) {
	if err := checkReplay(how); err != nil {
		return inbox.Replayed{}, wrap("replay", err)
	}
	r := replay{how: how, retention: l.retention}
	err := l.each(ctx, &walk{
		filter:  filter,
		bounded: true,
		visit: func(dead *inbox.DeadLetter) (Outcome, bool, error) {
			defer r.progress()
			return r.visit(ctx, dead)
		},
		failed: r.failed,
	})
	if r.done.Outlived > 0 {
		r.refused = errors.Join(r.refused, fmt.Errorf("%d messages: %w", r.done.Outlived, inbox.ErrOutlived))
	}
	err = errors.Join(err, r.refused)
	if !how.DryRun {
		what := "dead letters returned"
		if how.Edit != nil {
			what = "dead letters edited and returned"
		}
		l.audit(ctx, what, how.By, how.Reason, filter, err,
			slog.Int("returned", r.done.Returned), slog.Int("outlived", r.done.Outlived), slog.Int("failed", r.done.Failed))
	}
	return r.done, wrap("replay", err)
}

// audit leaves a record of a change, also of one that was made in part.
func (l *deadLetters) audit(ctx context.Context, what, by, reason string, filter inbox.Filter, err error, counts ...slog.Attr) {
	attrs := append([]slog.Attr{slog.String("by", by), slog.String("reason", reason), slog.Any("filter", filter)}, counts...)
	if err != nil {
		attrs = append(attrs, slog.Any("error", err))
	}
	l.logger.LogAttrs(ctx, slog.LevelInfo, what, attrs...)
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("inbox: %s dead letters: %w", what, err)
}

// replay is one call of Replay.
type replay struct {
	how       inbox.Replay
	retention time.Duration
	done      inbox.Replayed
	refused   error // the first reason why a message stays
}

func (r *replay) visit(ctx context.Context, dead *inbox.DeadLetter) (outcome Outcome, counts bool, err error) {
	switch {
	case outlived(r.how, *dead, r.retention, time.Now()):
		r.done.Outlived++
		return Keep, false, nil
	case dead.Message.Queue == "":
		r.done.Failed++
		r.refused = cmp.Or(r.refused, fmt.Errorf("message %s does not name the queue it came from", dead.Message.ID))
		return Keep, false, nil
	}
	if err := r.edit(&dead.Message); err != nil {
		r.done.Failed++
		r.refused = cmp.Or(r.refused, fmt.Errorf("message %s cannot be edited: %w", dead.Message.ID, err))
		return Keep, false, nil
	}
	if r.how.DryRun {
		r.done.Returned++
		return Keep, true, nil
	}
	if between := pause(r.how); between > 0 && r.done.Returned > 0 {
		if err := runloop.Sleep(ctx, between); err != nil {
			return Keep, false, err
		}
	}
	r.done.Returned++
	return Return, true, nil
}

// edit replaces the body of a message that is to return.
func (r *replay) edit(m *inbox.Message) (err error) {
	if r.how.Edit == nil {
		return nil
	}
	m.Body, err = r.how.Edit(*m)
	return err
}

func (r *replay) progress() {
	if r.how.Progress != nil {
		r.how.Progress(r.done)
	}
}

func (r *replay) failed(dead inbox.DeadLetter, why error) {
	r.done.Returned--
	r.done.Failed++
	r.refused = cmp.Or(r.refused, fmt.Errorf("message %s to queue %q: %w", dead.Message.ID, dead.Message.Queue, why))
}

// look visits the dead letters that the filter selects, and leaves them where they are.
func (l *deadLetters) look(ctx context.Context, filter inbox.Filter, see func(inbox.DeadLetter)) error {
	return l.each(ctx, &walk{filter: filter, visit: func(dead *inbox.DeadLetter) (Outcome, bool, error) {
		see(*dead)
		return Keep, true, nil
	}})
}

// walk is one way through the dead letters.
type walk struct {
	filter inbox.Filter
	// bounded says that the walk visits no more letters of a class than were counted when it began.
	bounded bool
	// visit says what becomes of a letter, and whether it counts towards the filter's limit.
	visit func(*inbox.DeadLetter) (outcome Outcome, counts bool, err error)
	// failed learns of letters that stay against visit's will.
	failed func(inbox.DeadLetter, error)

	left   int                // letters of this class that were there when the walk began
	taken  int                // towards the limit
	unseen map[uuid.UUID]bool // of filter.IDs
}

// each goes through the dead letters of all classes. How many there are is asked first: what is
// returned from one class may become a dead letter of a later one meanwhile. Those that a session has in
// hand are not counted, and may come back before the scan. A bounded walk cannot tell them from new ones.
func (l *deadLetters) each(ctx context.Context, w *walk) error {
	if err := checkFilter(w.filter); err != nil {
		return err
	}
	depths, err := l.counted(ctx, w)
	if err != nil {
		return err
	}
	w.unseen = make(map[uuid.UUID]bool, len(w.filter.IDs))
	for _, id := range w.filter.IDs {
		w.unseen[id] = true
	}
	var held error
	for _, depth := range depths {
		w.left = depth.Messages
		switch {
		case depth.Held && w.bounded:
			held = inbox.ErrHeld
		case depth.Held:
			w.left = math.MaxInt
		}
		if w.over() {
			continue
		}
		err := l.letters.Scan(ctx, depth.Class, w.next, w.stays)
		switch {
		case errors.Is(err, inbox.ErrHeld):
			held = err
		case err != nil:
			return err
		}
	}
	if w.satisfied() {
		return nil
	}
	return held
}

// A bounded walk waits so long for a session that has letters in hand. As a rule it is a look, and short.
const (
	heldPatience = time.Second
	heldPoll     = 50 * time.Millisecond
)

// counted asks how many letters there are.
func (l *deadLetters) counted(ctx context.Context, w *walk) ([]Depth, error) {
	held := func(d Depth) bool { return d.Held }
	for end := time.Now().Add(heldPatience); ; {
		depths, err := l.letters.Depths(ctx)
		if err != nil || !w.bounded || !slices.ContainsFunc(depths, held) || time.Now().After(end) {
			return depths, err
		}
		if err := runloop.Sleep(ctx, heldPoll); err != nil {
			return nil, err
		}
	}
}

func (w *walk) over() bool { return w.left <= 0 || w.filter.Limit > 0 && w.taken >= w.filter.Limit }

// satisfied reports whether all is found that was asked for, whatever there is besides.
func (w *walk) satisfied() bool {
	return w.filter.Limit > 0 && w.taken >= w.filter.Limit || len(w.filter.IDs) > 0 && len(w.unseen) == 0
}

func (w *walk) next(letter *inbox.DeadLetter) (Outcome, error) {
	if w.over() {
		return Keep, ErrDone
	}
	w.left--
	dead := completed(*letter)
	if !match(w.filter, dead) {
		return Keep, nil
	}
	delete(w.unseen, dead.Message.ID)
	outcome, counts, err := w.visit(&dead)
	letter.Message.Body = dead.Message.Body
	if counts {
		w.taken++
	}
	return outcome, err
}

func (w *walk) stays(dead inbox.DeadLetter, why error) {
	w.taken--
	w.failed(dead, why)
}

// JoinDeadLetters returns the dead letters of several places as those of one, place by place. A part that is nil has none.
func JoinDeadLetters(parts ...DeadLetters) DeadLetters {
	parts = slices.DeleteFunc(slices.Clone(parts), func(p DeadLetters) bool { return p == nil })
	if len(parts) == 1 {
		return parts[0]
	}
	return joined(parts)
}

type joined []DeadLetters

// Depths implements DeadLetters. It asks all places at the same time.
func (j joined) Depths(ctx context.Context) ([]Depth, error) {
	depths, errs := make([][]Depth, len(j)), make([]error, len(j))
	var asking sync.WaitGroup
	for i, part := range j {
		asking.Go(func() { depths[i], errs[i] = part.Depths(ctx) })
	}
	asking.Wait()
	if err := cmp.Or(errs...); err != nil {
		return nil, err
	}
	var sums []Depth
	for _, depth := range slices.Concat(depths...) {
		i, there := slices.BinarySearchFunc(sums, depth, func(a, b Depth) int { return strings.Compare(a.Class, b.Class) })
		if !there {
			sums = slices.Insert(sums, i, depth)
			continue
		}
		sum := &sums[i]
		if sum.Messages == 0 || depth.Messages > 0 && depth.Oldest.Before(sum.Oldest) {
			sum.Oldest = depth.Oldest
		}
		sum.Messages += depth.Messages
		sum.Held = sum.Held || depth.Held
	}
	return sums, nil
}

// Scan implements DeadLetters.
func (j joined) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	done := false
	noting := func(dead *inbox.DeadLetter) (Outcome, error) {
		outcome, err := visit(dead)
		done = errors.Is(err, ErrDone)
		return outcome, err
	}
	var held error
	for _, part := range j {
		err := part.Scan(ctx, class, noting, failed)
		if errors.Is(err, inbox.ErrHeld) {
			held, err = err, nil
		}
		if err != nil || done {
			return cmp.Or(err, held)
		}
	}
	return held
}
