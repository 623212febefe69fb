package outboxtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/internal/deadletter"
	"github.com/holdfast-go/holdfast/outbox/internal/stored"
)

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
