package outboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/internal/deadletter"
)

// Replay implements outbox.DeadLetters.
func (d *deadLetters) Replay(ctx context.Context, f outbox.Filter, r outbox.Replay) (outbox.Replayed, error) {
	return deadletter.Replay(ctx, &change{deadLetters: d, what: "replay", by: r.By, reason: r.Reason, chosenBy: f}, f, r)
}

// Remove implements outbox.DeadLetters.
func (d *deadLetters) Remove(ctx context.Context, f outbox.Filter, r outbox.Removal) (int, error) {
	return deadletter.Remove(ctx, &change{deadLetters: d, what: "remove", by: r.By, reason: r.Reason, chosenBy: f}, f, r)
}

// change is one Replay or Remove, with what the audit keeps of it.
type change struct {
	*deadLetters
	what, by, reason string
	chosenBy         outbox.Filter
	entry            int // of the audit; 0: none yet
}

// Selected implements deadletter.Store.
func (c *change) Selected(ctx context.Context, f outbox.Filter) (ids []uuid.UUID, err error) {
	return c.ids(ctx, c.sql.selected, filterArgs(f))
}

// Returnable implements deadletter.Store.
func (c *change) Returnable(ctx context.Context, f outbox.Filter, r outbox.Replay) (ids []uuid.UUID, stay outbox.Replayed, err error) {
	args := append(filterArgs(f), deadletter.Retention.Microseconds(), r.Force)
	ids, err = c.ids(ctx, c.sql.returnable, args, &stay.Outlived, &stay.Failed)
	return ids, stay, err
}

// ids reads a row that begins with ids.
func (c *change) ids(ctx context.Context, sql string, args []any, more ...any) ([]uuid.UUID, error) {
	var found uuids
	err := pgcall.Twice(ctx, c.pool, c.changeTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return queryPlanned(ctx, conn, beginReadSQL, sql, args, append([]any{&found}, more...))
	})
	if err != nil {
		return nil, fmt.Errorf("outboxpgx: %s dead letters: %w", c.what, c.t.explain(err))
	}
	ids := make([]uuid.UUID, len(found))
	for i, id := range found {
		ids[i] = id.Bytes
	}
	return ids, nil
}

// Return implements deadletter.Store. A step that meets an id which has come to the outbox since it began is tried once more:
// it then sees that one.
func (c *change) Return(ctx context.Context, s deadletter.Step, r outbox.Replay) (moved outbox.Replayed, err error) {
	var between int64 // microseconds
	if r.PerSecond > 0 {
		between = int64(min(float64(time.Second/time.Microsecond)/r.PerSecond, float64(365*24*time.Hour/time.Microsecond)))
	}
	for range 2 {
		err = c.step(ctx, c.sql.replay, s.Filter, []any{between, s.Before, s.Bodies}, &moved.Returned, &moved.Failed)
		if sqlstate.Of(err) != uniqueViolation {
			break
		}
	}
	if moved.Returned > 0 {
		c.wake()
	}
	return moved, err
}

// Delete implements deadletter.Store.
func (c *change) Delete(ctx context.Context, f outbox.Filter, _ outbox.Removal) (n int, err error) {
	err = c.step(ctx, c.sql.remove, f, nil, &n)
	return n, err
}

// step runs a statement that changes dead letters and notes who did so, in one round trip, so that no
// lock outlives a connection that falls silent. It scans the statement's one row into counts, which
// stay as they are on an error.
func (c *change) step(ctx context.Context, sql string, f outbox.Filter, more []any, counts ...*int) error {
	chosenBy, err := encodeFilter(c.chosenBy)
	if err != nil {
		return err
	}
	args := append(append(filterArgs(f), c.entry, c.by, c.reason, chosenBy), more...)
	counts = append(counts, &c.entry)
	got, dest := make([]int, len(counts)), make([]any, len(counts))
	for i := range got {
		dest[i] = &got[i]
	}
	err = pgcall.Within(ctx, c.pool, c.changeTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return queryPlanned(ctx, conn, beginSQL, sql, args, dest)
	})
	if err != nil {
		return fmt.Errorf("outboxpgx: %s dead letters: %w", c.what, c.t.explain(err))
	}
	for i, count := range counts {
		*count = got[i]
	}
	return nil
}

// queryPlanned scans the one row of a statement in a transaction, in one round trip.
func queryPlanned(ctx context.Context, conn *pgxpool.Conn, begin, sql string, args, dest []any) error {
	return planned(ctx, conn, begin, sql, args, func(q *pgx.QueuedQuery) {
		q.QueryRow(func(row pgx.Row) error { return row.Scan(dest...) })
	})
}

// planned runs a statement under deadPlansSQL in a transaction, in one round trip. read says what becomes of its rows.
func planned(ctx context.Context, conn *pgxpool.Conn, begin, sql string, args []any, read func(*pgx.QueuedQuery)) error {
	queue := &pgx.Batch{}
	queue.Queue(begin)
	queue.Queue(deadPlansSQL)
	read(queue.Queue(sql, args...))
	queue.Queue(commitSQL)
	return conn.SendBatch(ctx, queue).Close()
}
