package outboxpgx

import (
	"context"
	"log/slog"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// A session may lock a message for as long as it likes: somebody has changed it by hand and not committed, or a row of
// another table refers to it. The message is left alone then, and the later ones of its key with it, since they must not
// overtake it. See free in sql.go.

// stuckKeys are those of which a message was left alone.
type stuckKeys map[string]bool

// leaveOut reports whether to leave out a message too, since it is locked or behind one that is. Messages must come in
// their order.
func (s stuckKeys) leaveOut(key string, locked bool) bool {
	if locked && key != "" {
		s[key] = true
	}
	return locked || s[key]
}

// withoutLocked returns the outcomes that can be recorded now: those of messages that another session has locked, and of
// the later ones of their keys, are left out.
func (s *Store) withoutLocked(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) ([]driver.Settlement, error) {
	ids := newColumns(len(b.Messages))
	for _, m := range b.Messages {
		ids.add(driver.Settlement{ID: m.ID})
	}
	locked := map[uuid.UUID]bool{}
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(s.sql.locked, ids.ids).Query(func(rows pgx.Rows) error {
		var id [16]byte
		_, err := pgx.ForEachRow(rows, []any{&id}, func() error {
			locked[id] = true
			return nil
		})
		return err
	})
	queue.Queue(commitSQL)
	if err := s.send(ctx, queue); err != nil {
		return nil, err
	}
	left, stuck := map[uuid.UUID]bool{}, stuckKeys{}
	for _, m := range b.Messages {
		left[m.ID] = stuck.leaveOut(m.Key, locked[m.ID])
	}
	return slices.DeleteFunc(slices.Clone(outcomes), func(o driver.Settlement) bool { return left[o.ID] }), nil
}

// complain writes what happens again and again seldom.
func (s *Store) complain(ctx context.Context, what string, attrs ...slog.Attr) {
	if repeats, ok := s.complaints.Due(what); ok {
		s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, what, append(attrs, slog.Int("repeats", repeats))...)
	}
}
