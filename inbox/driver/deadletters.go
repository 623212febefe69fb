package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/deadletter"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// NewDeadLetter returns the dead letter of a message that failed at the time now.
func NewDeadLetter(m *inbox.Message, f Failure, consumer string, now time.Time) inbox.DeadLetter {
	first := m.FirstFailedAt
	if first.IsZero() {
		first = now
	}
	from := originOf(f.Err)
	d := inbox.DeadLetter{
		Message:       *m,
		Class:         f.Class,
		Error:         errorText(f, MaxErrorBytes),
		ErrorType:     from.goType,
		SQLState:      from.sqlState,
		Attempts:      max(m.Attempt, 1),
		FirstFailedAt: first,
		FailedAt:      now,
		Consumer:      consumer,
	}
	d.Fingerprint = fingerprint(d, from.where)
	return d
}

func errorText(f Failure, most int) string {
	if f.Err == nil {
		return ""
	}
	return truncate(f.Err.Error(), most)
}

// truncate cuts a text to at most n bytes of valid UTF-8.
func truncate(s string, n int) string {
	const tail = "…"
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	cut := n - len(tail)
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + tail
}

// DeadLetterQueue returns the name of the dead-letter queue of a class, such as billing.failed.validation.
// The prefix is prepended unchanged.
func DeadLetterQueue(prefix, class string) string { return prefix + "failed." + class }

// NewDeadLetters returns the dead letters for users, on top of a transport's DeadLetters. Retention is how long
// the consumer keeps entries of processed messages; a replay rejects older dead letters. The logger records
// who changed dead letters, and why.
func NewDeadLetters(kept DeadLetters, retention time.Duration, logger *slog.Logger) inbox.DeadLetters {
	return &deadLetters{kept, retention, logger, "dead letters", false}
}

// NewRetrying is NewDeadLetters for the messages that wait for a time: see Delayer. A replay with a delay rejects
// messages that would be older than retention when they are due.
func NewRetrying(kept DeadLetters, retention time.Duration, logger *slog.Logger) inbox.DeadLetters {
	return &deadLetters{kept, retention, logger, "waiting messages", true}
}

// NewWaiting returns a message that waits until due, as a transport's Delayer shows it. The message has the attempt
// that comes next. Its last failure, if it has one, becomes the error.
func NewWaiting(m *inbox.Message, class string, due time.Time) inbox.DeadLetter {
	d := inbox.DeadLetter{Message: *m, Class: class, Attempts: max(m.Attempt-1, 0), FirstFailedAt: m.FirstFailedAt, DueAt: due}
	if n := len(m.History); n > 0 {
		last := m.History[n-1]
		d.Error, d.FailedAt, d.Consumer, d.Message.History = last.Error, last.At, last.Consumer, m.History[:n-1]
	}
	return d
}

// deadLetters implements inbox.DeadLetters.
type deadLetters struct {
	kept      DeadLetters
	retention time.Duration
	logger    *slog.Logger
	noun      string // of its messages, in logs and errors
	waiting   bool   // for a time
}

// List implements inbox.DeadLetters.
func (l *deadLetters) List(ctx context.Context, filter inbox.Filter) ([]inbox.DeadLetter, error) {
	filter.Limit = cmp.Or(filter.Limit, deadletter.ListLimit)
	var found []inbox.DeadLetter
	left := 0
	if filter.Whole {
		left = deadletter.ListBytes
	}
	err := l.look(ctx, filter, func(dead inbox.DeadLetter) {
		if left -= contentBytes(dead); left < 0 {
			dead = withoutContent(dead)
		}
		found = append(found, dead)
	})
	return found, l.wrap("list", err)
}

// contentBytes returns the size of the body and headers, at least 1.
func contentBytes(dead inbox.DeadLetter) int {
	n := 1 + len(dead.Message.Body)
	for name, value := range dead.Message.Headers {
		n += len(name) + len(value)
	}
	return n
}

// withoutContent returns a dead letter without body and headers. A hundred bodies may exceed a gigabyte.
func withoutContent(dead inbox.DeadLetter) inbox.DeadLetter {
	dead.Message.Body, dead.Message.Headers, dead.Omitted = nil, nil, true
	return dead
}

// Show implements inbox.DeadLetters. If several have the id, it returns the latest.
func (l *deadLetters) Show(ctx context.Context, id uuid.UUID) (inbox.DeadLetter, error) {
	var latest *inbox.DeadLetter
	err := l.look(ctx, inbox.Filter{IDs: []uuid.UUID{id}}, func(dead inbox.DeadLetter) {
		if latest == nil || dead.FailedAt.After(latest.FailedAt) {
			latest = &dead
		}
	})
	switch {
	case err != nil:
		return inbox.DeadLetter{}, l.wrap("show", err)
	case latest == nil:
		return inbox.DeadLetter{}, l.wrap("show", fmt.Errorf("message %s: %w", id, inbox.ErrNotFound))
	}
	return *latest, nil
}

// Count implements inbox.DeadLetters.
func (l *deadLetters) Count(ctx context.Context, filter inbox.Filter) (n int, err error) {
	err = l.look(ctx, filter, func(inbox.DeadLetter) { n++ })
	return n, l.wrap("count", err)
}

// Groups implements inbox.DeadLetters.
func (l *deadLetters) Groups(ctx context.Context, filter inbox.Filter) ([]inbox.Group, error) {
	if err := filter.Check(); err != nil {
		return nil, l.wrap("group", err)
	}
	most := filter.Limit
	filter.Limit = 0 // it bounds the groups
	kinds := deadletter.Groups[inbox.Message]{Most: deadletter.GroupsLimit}
	err := l.look(ctx, filter, func(dead inbox.DeadLetter) { kinds.Add(withoutContent(dead)) })
	return kinds.Largest(most), l.wrap("group", err)
}

// Remove implements inbox.DeadLetters.
func (l *deadLetters) Remove(ctx context.Context, filter inbox.Filter, r inbox.Removal) (n int, err error) {
	if err := r.Check(); err != nil {
		return 0, l.wrap("remove", err)
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
			if !errors.Is(why, ErrGone) {
				refused = cmp.Or(refused, why)
			}
		},
	})
	err = errors.Join(err, refused)
	l.audit(ctx, l.noun+" removed", r.By, r.Reason, filter, err, slog.Int("removed", n))
	return n, l.wrap("remove", err)
}

// Replay implements inbox.DeadLetters. The error names the first message that could not be returned, and has
// the number of messages that were too old.
func (l *deadLetters) Replay(ctx context.Context, filter inbox.Filter, how inbox.Replay) (inbox.Replayed, error) {
	check := how.CheckDead
	if l.waiting {
		check = how.CheckWaiting
	}
	if err := check(); err != nil {
		return inbox.Replayed{}, l.wrap("replay", err)
	}
	r := replay{how: how, retention: l.retention, waiting: l.waiting, moved: map[uuid.UUID]int{}}
	err := l.each(ctx, &walk{
		filter:  filter,
		returns: true,
		visit: func(dead *inbox.DeadLetter) (Outcome, bool, error) {
			defer r.progress()
			return r.visit(ctx, dead)
		},
		failed: r.failed,
	})
	err = errors.Join(err, r.refused, deadletter.Outlived(r.done.Outlived))
	if !how.DryRun {
		what := l.noun + " returned"
		if how.Edit != nil {
			what = l.noun + " edited and returned"
		}
		l.audit(ctx, what, how.By, how.Reason, filter, err,
			slog.Int("returned", r.done.Returned), slog.Int("outlived", r.done.Outlived), slog.Int("failed", r.done.Failed))
	}
	return r.done, l.wrap("replay", err)
}

// audit logs a change, even if it succeeded only in part.
func (l *deadLetters) audit(ctx context.Context, what, by, reason string, filter inbox.Filter, err error, counts ...slog.Attr) {
	attrs := append([]slog.Attr{slog.String("by", by), slog.String("reason", reason), slog.Any("filter", filter)}, counts...)
	if err != nil {
		attrs = append(attrs, slog.Any("error", err))
	}
	l.logger.LogAttrs(ctx, slog.LevelInfo, what, attrs...)
}

func (l *deadLetters) wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("inbox: %s %s: %w", what, l.noun, err)
}

// replay is one call of Replay.
type replay struct {
	how       inbox.Replay
	retention time.Duration
	waiting   bool // the messages wait for a time
	done      inbox.Replayed
	refused   error             // the first reason for a message that was not returned
	moved     map[uuid.UUID]int // the Replays of the returned messages. A message without an id may be returned once per class
}

func (r *replay) visit(ctx context.Context, dead *inbox.DeadLetter) (outcome Outcome, counts bool, err error) {
	later, id := r.later(), dead.Message.ID
	before, moved := r.moved[id]
	switch {
	case moved && (r.waiting || dead.Message.Replays > before): // it failed again meanwhile. One call could use up its attempts
		return Keep, false, nil
	case (!r.waiting || later > 0) && outlived(r.how, *dead, r.retention, time.Now().Add(later)):
		r.done.Outlived++
		return Keep, false, nil
	case dead.Message.Queue == "":
		r.refuse("message %s has no queue to return to", dead.Message.ID)
		return Keep, false, nil
	}
	if err := r.edit(&dead.Message); err != nil {
		r.refuse("message %s cannot be edited: %w", dead.Message.ID, err)
		return Keep, false, nil
	}
	if r.how.DryRun {
		r.done.Returned++
		return Keep, true, nil
	}
	if r.waiting {
		dead.DueAt = time.Now().Add(later)
	} else if between := r.how.Between(); between > 0 && r.done.Returned > 0 {
		if err := runloop.Sleep(ctx, between); err != nil {
			return Keep, false, err
		}
	}
	r.done.Returned++
	if id != uuid.Nil {
		r.moved[id] = dead.Message.Replays
	}
	return Return, true, nil
}

// later returns the time until the next waiting message is due. The due times keep Replay.PerSecond, because RabbitMQ
// delivers no waiting message of any consumer during a scan.
func (r *replay) later() time.Duration {
	const most = 365 * 24 * time.Hour
	return r.how.Delay + time.Duration(min(float64(r.done.Returned)*float64(r.how.Between()), float64(most)))
}

// outlived reports whether a dead letter is too old to be returned: the entries of processed messages are
// kept for the retention only.
func outlived(r inbox.Replay, d inbox.DeadLetter, retention time.Duration, now time.Time) bool {
	born := bornAt(d)
	return !r.Force && !born.IsZero() && now.Sub(born) > retention
}

// bornAt returns the time at which a message was sent: its time stamp, else the time in its id. The time in
// the id may be something else, such as the deadline of an expiry event. If the message failed before that
// time, bornAt returns the first failure: the sender's clock is wrong, or the consumer derives the id.
func bornAt(d inbox.DeadLetter) time.Time {
	sent := wire.PublishedAt(d.Message.PublishedAt, nil, d.Message.ID)
	if sent.IsZero() || !d.FirstFailedAt.IsZero() && d.FirstFailedAt.Before(sent) {
		return d.FirstFailedAt
	}
	return sent
}

// edit replaces the body of a message before it is returned.
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
	if errors.Is(why, ErrGone) {
		return
	}
	r.refuse("message %s to queue %q: %w", dead.Message.ID, dead.Message.Queue, why)
}

// refuse counts a message that was not returned, and keeps the first reason.
func (r *replay) refuse(format string, args ...any) {
	r.done.Failed++
	r.refused = cmp.Or(r.refused, fmt.Errorf(format, args...))
}

// Each calls see for the dead letters that the filter selects, one after the other, without their bodies and headers. Package
// operator shows the first ones while it reads the others, which may take minutes.
func (l *deadLetters) Each(ctx context.Context, filter inbox.Filter, see func(inbox.DeadLetter)) error {
	return l.wrap("read", l.look(ctx, filter, func(dead inbox.DeadLetter) { see(withoutContent(dead)) }))
}

// Exclusive reports whether a session hides the dead letters that it reads from others. Package operator then lets nobody read
// beside a change.
func (l *deadLetters) Exclusive() bool { return exclusive(l.kept) }

func exclusive(kept DeadLetters) bool {
	e, ok := kept.(interface{ Exclusive() bool })
	return ok && e.Exclusive()
}

// look visits the dead letters that the filter selects, without changing them.
func (l *deadLetters) look(ctx context.Context, filter inbox.Filter, see func(inbox.DeadLetter)) error {
	return l.each(ctx, &walk{filter: filter, visit: func(dead *inbox.DeadLetter) (Outcome, bool, error) {
		see(*dead)
		return Keep, true, nil
	}})
}

// walk is one pass over the dead letters.
type walk struct {
	filter inbox.Filter
	// returns means that the walk returns dead letters. It first waits for another session that has some in flight.
	returns bool
	// visit returns the outcome of a dead letter, and whether it counts towards the filter's limit.
	visit func(*inbox.DeadLetter) (outcome Outcome, counts bool, err error)
	// failed is called for a dead letter whose outcome could not be applied.
	failed func(inbox.DeadLetter, error)

	taken  int                // counted towards the limit
	unseen map[uuid.UUID]bool // the ids of filter.IDs that were not found yet
}

// each walks through the dead letters of all classes that have some.
func (l *deadLetters) each(ctx context.Context, w *walk) error {
	if err := w.filter.Check(); err != nil {
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
		if depth.Held && w.returns {
			held = inbox.ErrHeld
		}
		if depth.Messages == 0 && !depth.Held || w.over() {
			continue
		}
		err := l.kept.Scan(ctx, depth.Class, w.next, w.stays)
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

// A walk that returns dead letters waits this long for another session that has dead letters in flight. Such a session is
// usually a short listing.
const (
	heldPatience = time.Second
	heldPoll     = 50 * time.Millisecond
)

// counted returns the number of dead letters per class.
func (l *deadLetters) counted(ctx context.Context, w *walk) ([]Depth, error) {
	held := func(d Depth) bool { return d.Held }
	for end := time.Now().Add(heldPatience); ; {
		depths, err := l.kept.Depths(ctx)
		if err != nil || !w.returns || !slices.ContainsFunc(depths, held) || time.Now().After(end) {
			return depths, err
		}
		if err := runloop.Sleep(ctx, heldPoll); err != nil {
			return nil, err
		}
	}
}

// over reports whether the limit of the filter is reached.
func (w *walk) over() bool { return w.filter.Limit > 0 && w.taken >= w.filter.Limit }

// satisfied reports whether everything that the filter asks for was found, even if there are more.
func (w *walk) satisfied() bool {
	return w.over() || len(w.filter.IDs) > 0 && len(w.unseen) == 0
}

func (w *walk) next(found *inbox.DeadLetter) (Outcome, error) {
	if w.over() {
		return Keep, ErrDone
	}
	dead := completed(*found)
	if !deadletter.Matches(w.filter, dead, dead.Message.ID, dead.Message.Name, dead.Message.Key) {
		return Keep, nil
	}
	delete(w.unseen, dead.Message.ID)
	outcome, counts, err := w.visit(&dead)
	found.Message.Body, found.DueAt = dead.Message.Body, dead.DueAt
	if counts {
		w.taken++
	}
	return outcome, err
}

func (w *walk) stays(dead inbox.DeadLetter, why error) {
	w.taken--
	w.failed(dead, why)
}

// JoinDeadLetters combines several DeadLetters into one, in their order. Nil parts are skipped.
func JoinDeadLetters(parts ...DeadLetters) DeadLetters {
	parts = slices.DeleteFunc(slices.Clone(parts), func(p DeadLetters) bool { return p == nil })
	if len(parts) == 1 {
		return parts[0]
	}
	return joined(parts)
}

type joined []DeadLetters

// Exclusive reports whether a session hides the dead letters of a part from others.
func (j joined) Exclusive() bool { return slices.ContainsFunc(j, exclusive) }

// Depths implements DeadLetters. It asks all parts at the same time.
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
