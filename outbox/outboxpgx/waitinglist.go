package outboxpgx

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/internal/deadletter"
	"github.com/holdfast-go/holdfast/outbox/internal/stored"
)

// $1 name, $2 key, $3 limit. Each lane is walked from its begin and stops at the limit; held rows are all
// looked at.
const waitingReadySQL = `
SELECT * FROM (
  SELECT r.* FROM {lanes} l CROSS JOIN LATERAL (
    SELECT o.*, {fits} AS fits FROM {outbox} o
    WHERE o.lane = l.lane AND o.seq >= l.floor AND o.published_at IS NULL AND o.due_at IS NULL
      AND ($1::text IS NULL OR o.name = $1) AND ($2::text IS NULL OR o.ordering_key = $2)
    ORDER BY o.seq LIMIT $3) r
  UNION ALL
  (SELECT o.*, {fits} AS fits FROM {outbox} o
   WHERE o.published_at IS NULL AND o.due_at IS NOT NULL AND o.held
     AND ($1::text IS NULL OR o.name = $1) AND ($2::text IS NULL OR o.ordering_key = $2)
   ORDER BY o.seq LIMIT $3)) a
ORDER BY seq LIMIT $3`

const waitingParkedSQL = `
SELECT o.*, {fits} AS fits FROM {outbox} o
WHERE o.published_at IS NULL AND o.due_at IS NOT NULL AND NOT o.held
  AND ($1::text IS NULL OR o.name = $1) AND ($2::text IS NULL OR o.ordering_key = $2)
ORDER BY o.due_at, o.seq LIMIT $3`

// $4 bytes of all bodies.
const waitingListSQL = `
SELECT {record}, coalesce(left(error_class, 100), ''), coalesce(left(last_error, 1000), ''), CASE WHEN NOT held THEN due_at END
FROM (SELECT w.*, fits AS texts, fits AND sum(octet_length(body)) FILTER (WHERE fits) OVER (ORDER BY due_at, seq) <= $4 AS whole
      FROM ({waitingRows}) w) w
ORDER BY CASE WHEN NOT held THEN due_at END, seq`

// Waiting returns the messages that f selects. Like a read of dead letters it has 10 s, and 10 s more on
// another connection. Bodies of more than 32 MiB together are left out, as in a list of dead letters.
// Of what lies below a lane's floor that is wrong, nothing is seen until a claim has put the floor right.
func (s *Store) Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error) {
	limit := cmp.Or(f.Limit, deadletter.ListLimit)
	if err := deadletter.CheckFilter(outbox.Filter{Name: f.Name, Key: f.Key, Limit: limit}); err != nil {
		return nil, err
	}
	sql := s.dead.sql.waitingReady
	if f.Parked {
		sql = s.dead.sql.waitingParked
	}
	return collect(ctx, s.dead, "list messages", scanWaiting, sql, nullable(f.Name), nullable(f.Key), limit, listBytes)
}

func scanWaiting(row pgx.CollectableRow) (w outbox.Waiting, err error) {
	var r record
	var due pgtype.Timestamptz
	if err := row.Scan(r.dest(&w.Class, &w.Error, &due)...); err != nil {
		return w, err
	}
	m, unreadable := r.message()
	w.Message, w.Attempts, w.CreatedAt, w.DueAt, w.Unreadable = stored.Message(m), m.Attempts, m.CreatedAt, due.Time, unreadable
	return w, nil
}
