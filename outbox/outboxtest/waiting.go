package outboxtest

import (
	"cmp"
	"context"
	"slices"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/internal/deadletter"
	"github.com/holdfast-go/holdfast/outbox/internal/stored"
)

// Waiting returns the messages that f selects. Of what the last attempt met the fake keeps nothing.
func (s *Store) Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error) {
	limit := cmp.Or(f.Limit, deadletter.ListLimit)
	if err := deadletter.CheckFilter(outbox.Filter{Name: f.Name, Key: f.Key, Limit: limit}); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
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
		found = append(found, outbox.Waiting{
			Message: stored.Message(clone(e.Message)), CreatedAt: e.CreatedAt, DueAt: e.due, Attempts: e.Attempts,
		})
	}
	slices.SortStableFunc(found, func(a, b outbox.Waiting) int { return a.DueAt.Compare(b.DueAt) })
	return found[:min(limit, len(found))], nil
}
