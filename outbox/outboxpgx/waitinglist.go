package outboxpgx

import (
	"cmp"
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/internal/deadletter"
	"github.com/holdfast-go/holdfast/outbox/internal/stored"
)

// $1 name, $2 key, $3 limit, $5 the seq behind which the list begins. Each lane is walked from its begin and stops at the limit; held rows are all
// looked at.
const waitingReadySQL = `
SELECT * FROM (
  SELECT r.* FROM {lanes} l CROSS JOIN LATERAL (
    SELECT o.*, {fits} AS fits FROM {outbox} o
    WHERE o.lane = l.lane AND o.seq >= l.floor AND o.seq > $5::bigint AND o.published_at IS NULL AND o.due_at IS NULL
      AND ($1::text IS NULL OR o.name = $1) AND ($2::text IS NULL OR o.ordering_key = $2)
    ORDER BY o.seq LIMIT $3) r
  UNION ALL
  (SELECT o.*, {fits} AS fits FROM {outbox} o
   WHERE o.published_at IS NULL AND o.due_at IS NOT NULL AND o.held AND o.seq > $5
     AND ($1::text IS NULL OR o.name = $1) AND ($2::text IS NULL OR o.ordering_key = $2)
   ORDER BY o.seq LIMIT $3)) a
ORDER BY seq LIMIT $3`

// $6 is the time when the message is due behind which the list begins.
const waitingParkedSQL = `
SELECT o.*, {fits} AS fits FROM {outbox} o
WHERE o.published_at IS NULL AND o.due_at IS NOT NULL AND NOT o.held AND (o.due_at, o.seq) > ($6::timestamptz, $5::bigint)
  AND ($1::text IS NULL OR o.name = $1) AND ($2::text IS NULL OR o.ordering_key = $2)
ORDER BY o.due_at, o.seq LIMIT $3`

// $4 bytes of all bodies.
const waitingListSQL = `
SELECT {record}, coalesce(left(error_class, 100), ''), coalesce(left(last_error, 1000), ''), CASE WHEN NOT held THEN due_at END, seq
FROM (SELECT w.*, fits AS texts, fits AND sum(octet_length(body)) FILTER (WHERE fits) OVER (ORDER BY due_at, seq) <= $4 AS whole
      FROM ({waitingRows}) w) w
ORDER BY CASE WHEN NOT held THEN due_at END, seq`

// Waiting returns the messages that f selects. Like a read of dead letters it has 10 s, and 10 s more on
// another connection. Bodies of more than 32 MiB together are left out, as in a list of dead letters.
// Of what lies below a lane's floor that is wrong, nothing is seen until a claim has put the floor right.
func (s *Store) Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error) {
	limit := cmp.Or(f.Limit, deadletter.ListLimit)
	after, err := parseCursor(f.After)
	if err := errors.Join(err, deadletter.CheckFilter(outbox.Filter{Name: f.Name, Key: f.Key, Limit: limit})); err != nil {
		return nil, err
	}
	sql, args := s.dead.sql.waitingReady, []any{nullable(f.Name), nullable(f.Key), limit, listBytes, after.seq}
	if f.Parked {
		sql, args = s.dead.sql.waitingParked, append(args, after.at)
	}
	return collect(ctx, s.dead, "list messages", scanWaiting, sql, args...)
}

func scanWaiting(row pgx.CollectableRow) (w outbox.Waiting, err error) {
	var r record
	var due pgtype.Timestamptz
	var seq int64
	if err := row.Scan(r.dest(&w.Class, &w.Error, &due, &seq)...); err != nil {
		return w, err
	}
	m, unreadable := r.message()
	w.Message, w.Attempts, w.CreatedAt, w.DueAt, w.Unreadable = stored.Message(m), m.Attempts, m.CreatedAt, due.Time, unreadable
	w.Cursor = cursor{due, seq}.String()
	return w, nil
}
