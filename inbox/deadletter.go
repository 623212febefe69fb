package inbox

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// MaxErrorBytes bounds the error text that a dead letter keeps.
const MaxErrorBytes = 1024

// ErrNotFound is returned where a dead letter of one id is asked for and there is none.
var ErrNotFound = errors.New("inbox: no such dead letter")

// DeadLetter is a message that was given up, with what is known about why.
type DeadLetter struct {
	// Message is the message as it last arrived. Its Queue is where a replay returns it to.
	Message Message
	// Class is the class of the last failure; it selects the dead-letter queue.
	Class string
	// Attempts is how often the message was tried, the last time included.
	Attempts int
	// FirstFailedAt and LastFailedAt are the consumer's times of the failures.
	FirstFailedAt, LastFailedAt time.Time
	// Error is the text of the last failure, at most MaxErrorBytes of valid UTF-8.
	Error string
	// Consumer names who gave the message up.
	Consumer string
}

// NewDeadLetter makes the dead letter of a message that failed at the time now.
func NewDeadLetter(m *Message, f Failure, consumer string, now time.Time) DeadLetter {
	first := m.FirstFailedAt
	if first.IsZero() {
		first = now
	}
	var text string
	if f.Err != nil {
		text = truncate(f.Err.Error(), MaxErrorBytes)
	}
	return DeadLetter{
		Message:       *m,
		Class:         f.Class,
		Attempts:      max(m.Attempt, 1),
		FirstFailedAt: first,
		LastFailedAt:  now,
		Error:         text,
		Consumer:      consumer,
	}
}

// DeadLetterQueue returns the name of the queue that holds a class, such as
// failed.validation; prefix is put before it as it is, and is usually empty.
func DeadLetterQueue(prefix, class string) string { return prefix + "failed." + class }

// Filter selects dead letters: those that meet all its fields. The zero value selects all.
type Filter struct {
	// IDs are the message ids wanted; empty means any.
	IDs []uuid.UUID
	// Class is the class wanted; empty means any.
	Class string
	// Name is the message name wanted; empty means any.
	Name string
	// FailedAfter and FailedBefore bound the last failure: after ≤ time < before. Zero means unbounded.
	FailedAfter, FailedBefore time.Time
	// ErrorContains is a text that the error has in it, letter case aside; empty means any.
	ErrorContains string
	// Limit bounds how many are listed, removed or returned; those that a replay leaves where
	// they are do not count. 0 means all. Match does not look at it.
	Limit int
}

// LogValue implements slog.LogValuer with the fields that are set.
func (f Filter) LogValue() slog.Value {
	var attrs []slog.Attr
	text := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	moment := func(key string, value time.Time) {
		if !value.IsZero() {
			attrs = append(attrs, slog.Time(key, value))
		}
	}
	if len(f.IDs) > 0 {
		attrs = append(attrs, slog.Int("ids", len(f.IDs)), slog.Any("first_id", f.IDs[0]))
	}
	text("class", f.Class)
	text("name", f.Name)
	moment("failed_after", f.FailedAfter)
	moment("failed_before", f.FailedBefore)
	text("error_contains", f.ErrorContains)
	if f.Limit > 0 {
		attrs = append(attrs, slog.Int("limit", f.Limit))
	}
	return slog.GroupValue(attrs...)
}

// Validate returns an error for a negative Limit, which must not be taken for none.
func (f Filter) Validate() error {
	if f.Limit < 0 {
		return fmt.Errorf("inbox: Filter.Limit %d is negative", f.Limit)
	}
	return nil
}

// Match reports whether the filter selects a dead letter.
func (f Filter) Match(d DeadLetter) bool {
	switch {
	case len(f.IDs) > 0 && !slices.Contains(f.IDs, d.Message.ID),
		f.Class != "" && f.Class != d.Class,
		f.Name != "" && f.Name != d.Message.Name,
		!f.FailedAfter.IsZero() && d.LastFailedAt.Before(f.FailedAfter),
		!f.FailedBefore.IsZero() && !d.LastFailedAt.Before(f.FailedBefore),
		f.ErrorContains != "" && !strings.Contains(strings.ToLower(d.Error), strings.ToLower(f.ErrorContains)):
		return false
	}
	return true
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
