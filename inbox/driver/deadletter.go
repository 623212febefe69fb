package driver

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/actor"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// NewDeadLetter makes the dead letter of a message that failed at the time now.
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

// DeadLetterQueue returns the name of the queue that holds a class, such as
// billing.failed.validation; prefix is put before it as it is.
func DeadLetterQueue(prefix, class string) string { return prefix + "failed." + class }

// checkFilter returns an error for a negative Limit, which must not count as none.
func checkFilter(f inbox.Filter) error {
	if f.Limit < 0 {
		return fmt.Errorf("inbox: Filter.Limit %d is negative", f.Limit)
	}
	return nil
}

// match reports whether the filter, its Limit aside, selects a dead letter.
func match(f inbox.Filter, d inbox.DeadLetter) bool {
	switch {
	case len(f.IDs) > 0 && !slices.Contains(f.IDs, d.Message.ID),
		f.Class != "" && f.Class != d.Class,
		f.Name != "" && f.Name != d.Message.Name,
		f.Key != "" && f.Key != d.Message.Key,
		f.Fingerprint != "" && f.Fingerprint != d.Fingerprint,
		!f.FailedAfter.IsZero() && d.FailedAt.Before(f.FailedAfter),
		!f.FailedBefore.IsZero() && !d.FailedAt.Before(f.FailedBefore),
		f.ErrorContains != "" && !strings.Contains(strings.ToLower(d.Error), strings.ToLower(f.ErrorContains)):
		return false
	}
	return true
}

// checkReplay returns every violation in one error, naming the fields.
func checkReplay(r inbox.Replay) error {
	var problems []error
	if !r.DryRun {
		problems = append(problems, actor.Check("inbox: Replay.By", "inbox: Replay.Reason", r.By, r.Reason))
	}
	if !(r.PerSecond >= 0) || math.IsInf(r.PerSecond, 0) {
		problems = append(problems, fmt.Errorf("inbox: Replay.PerSecond %v is not a number of at least 0", r.PerSecond))
	}
	return errors.Join(problems...)
}

// outlived reports whether a dead letter is too old to be returned now: what was processed is
// remembered for retention only.
func outlived(r inbox.Replay, d inbox.DeadLetter, retention time.Duration, now time.Time) bool {
	born := bornAt(d)
	return !r.Force && !born.IsZero() && now.Sub(born) > retention
}

// bornAt is when a message was sent: its time stamp, else the time in its id. The time in the id may be another one, as
// that of an expiry's event, which is a deadline. A message that failed before that is as old as its first failure: the clock
// of its sender is wrong, or its consumer derives the id.
func bornAt(d inbox.DeadLetter) time.Time {
	sent := wire.PublishedAt(d.Message.PublishedAt, nil, d.Message.ID)
	if sent.IsZero() || !d.FirstFailedAt.IsZero() && d.FirstFailedAt.Before(sent) {
		return d.FirstFailedAt
	}
	return sent
}

// pause is the time from one returned message to the next.
func pause(r inbox.Replay) time.Duration {
	if r.PerSecond == 0 {
		return 0
	}
	return time.Duration(min(float64(time.Second)/r.PerSecond, math.MaxInt64/2)) // it may be next to nothing
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
