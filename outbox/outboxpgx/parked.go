package outboxpgx

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/deadletter"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox"
)

// Operators' changes of parked messages: rows that wait for their own due time. See waiting.go for the states.
//
// A change locks the lanes of its rows first and reads the rows after that, like all changes of waiting rows. A row that
// a release has made ready meanwhile stays as it is and is not counted. A row that is locked by another session is left
// out as well, because waiting for it would stop its lane. So is a row to remove if the next one of its key is locked.
//
// A message that becomes due now keeps a due time, so that a release makes it ready together with the rows held behind
// it. If a message of a key is removed, the next one takes its place in the key: it is due now.

// parked implements outbox.DeadLetters for parked messages.
type parked struct {
	*deadLetters
	nextDue *nextDue // of claims in this process
}

// Parked returns the messages that wait for their first or next attempt, ordered by due time. Their methods have the
// time limits of DeadLetters, and the same audit. Replay makes messages due now or after Replay.Delay; it keeps their
// attempts. The later messages of a key wait as long as the first one. Remove lets them go on without it. A message that
// another session has locked is left out and not counted; so is one to remove if the next one of its key is locked.
//
// A message without a failed attempt has no Class, Error or Fingerprint. FailedAt is zero, and Filter.FailedAfter and
// FailedBefore are rejected, because an outbox stores the time of the last failure for dead letters only. The times of a
// Group are due times.
func (s *Store) Parked() outbox.DeadLetters { return s.parked }

func newParked(of *deadLetters, next *nextDue) parked {
	d := *of
	d.sql, d.noun, d.scan = of.t.parkedStatements(of.sql), "parked messages", scanParked
	return parked{&d, next}
}

func scanParked(row pgx.CollectableRow, whole bool) (outbox.DeadLetter, error) {
	d, err := scanDeadLetter(row, whole)
	d.DueAt, d.FailedAt = d.FailedAt, time.Time{}
	return d, err
}

// timeless rejects a filter by times of failures.
func timeless(f outbox.Filter) error {
	if !f.FailedAfter.IsZero() || !f.FailedBefore.IsZero() {
		return errors.New("Filter.FailedAfter and Filter.FailedBefore are only for dead letters")
	}
	return nil
}

// List implements outbox.DeadLetters.
func (p parked) List(ctx context.Context, f outbox.Filter) ([]outbox.DeadLetter, error) {
	if err := timeless(f); err != nil {
		return nil, wrap("list parked messages", err)
	}
	return p.deadLetters.List(ctx, f)
}

// Count implements outbox.DeadLetters.
func (p parked) Count(ctx context.Context, f outbox.Filter) (int, error) {
	if err := timeless(f); err != nil {
		return 0, wrap("count parked messages", err)
	}
	return p.deadLetters.Count(ctx, f)
}

// Groups implements outbox.DeadLetters.
func (p parked) Groups(ctx context.Context, f outbox.Filter) ([]outbox.Group, error) {
	if err := timeless(f); err != nil {
		return nil, wrap("group parked messages", err)
	}
	found, err := p.deadLetters.Groups(ctx, f)
	for i := range found {
		s := &found[i].Sample
		s.DueAt, s.FailedAt = s.FailedAt, time.Time{}
	}
	return found, err
}

// Replay implements outbox.DeadLetters.
func (p parked) Replay(ctx context.Context, f outbox.Filter, r outbox.Replay) (outbox.Replayed, error) {
	if err := errors.Join(timeless(f), r.CheckWaiting()); err != nil {
		return outbox.Replayed{}, wrap("move parked messages", err)
	}
	done, err := deadletter.InSteps(ctx, p.change(r.By, r.Reason, f), f, r)
	return done, wrap("move parked messages", err)
}

// Remove implements outbox.DeadLetters.
func (p parked) Remove(ctx context.Context, f outbox.Filter, r outbox.Removal) (int, error) {
	if err := timeless(f); err != nil {
		return 0, wrap("remove parked messages", err)
	}
	n, err := deadletter.RemoveInSteps(ctx, p.change(r.By, r.Reason, f), f, r)
	return n, wrap("remove parked messages", err)
}

func (p parked) change(by, reason string, f outbox.Filter) *parkedChange {
	return &parkedChange{change{deadLetters: p.deadLetters, by: by, reason: reason, chosenBy: f}, p.nextDue}
}

// parkedChange is one Replay or Remove of parked messages. It is a deadletter.Store.
type parkedChange struct {
	change
	nextDue *nextDue
}

// Returnable implements deadletter.Store. Waiting messages have no age at which they are rejected.
func (c *parkedChange) Returnable(ctx context.Context, f outbox.Filter, _ outbox.Replay) ([]uuid.UUID, outbox.Replayed, error) {
	ids, err := c.Selected(ctx, f)
	return ids, outbox.Replayed{}, err
}

// Preview implements deadletter.Store.
func (c *parkedChange) Preview(ctx context.Context, f outbox.Filter, _ outbox.Replay) (counts outbox.Replayed, err error) {
	err = pgcall.Twice(ctx, c.pool, c.readTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, c.sql.count, filterArgs(f)...).Scan(&counts.Returned)
	})
	return counts, c.t.explain(err)
}

// Return implements deadletter.Store.
func (c *parkedChange) Return(ctx context.Context, s deadletter.Step, r outbox.Replay) (moved outbox.Replayed, err error) {
	args := []any{r.Between().Microseconds(), s.Before, r.Delay.Microseconds()}
	err = c.step(ctx, c.sql.replay, s.Filter, args, &moved.Returned)
	c.wakeFor(moved.Returned)
	return moved, err
}

// Delete implements deadletter.Store.
func (c *parkedChange) Delete(ctx context.Context, f outbox.Filter) (n int, err error) {
	n, err = c.change.Delete(ctx, f)
	c.wakeFor(n)
	return n, err
}

// wakeFor wakes a relay after a change. Messages may be due.
func (c *parkedChange) wakeFor(changed int) {
	if changed > 0 {
		c.nextDue.set(time.Now())
		c.wake()
	}
}

// parkedStatements returns the statements of dead letters for parked messages.
func (t tables) parkedStatements(of deadStatements) deadStatements {
	fill := func(sql string) string {
		parts := strings.NewReplacer("{where}", deadWhere, "{match}", deadMatch, "{letters}", parkedSQL,
			"{moveNoted}", strings.ReplaceAll(deadNoted, "{action}", "CASE WHEN $16::bigint > 0 THEN 'postpone' ELSE 'retry' END"),
			"{removeNoted}", strings.ReplaceAll(deadNoted, "{action}", "'drop'"),
			"{fits}", strings.ReplaceAll(fits, "{max}", "$10::bigint"),
			"{waiting}", waiting, "{free}", free, "{record}", recordWith("$13::boolean"))
		return t.fill(parts.Replace(parts.Replace(sql)))
	}
	of.list, of.count, of.groups, of.selected = fill(deadListSQL), fill(deadCountSQL), fill(deadGroupsSQL), fill(deadSelectedSQL)
	of.lock, of.replay, of.remove = fill(parkedLockSQL), fill(parkedMoveSQL), fill(parkedRemoveSQL)
	return of
}

// parkedSQL is the table of dead letters for parked messages, with the due time in place of the time of death. The
// fingerprint is the one that the dead letter would have: see migrations/0001_outbox.sql.
const parkedSQL = `(
  SELECT id, seq, lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers, created_at,
    attempts, coalesce(error_class, '') AS error_class, coalesce(last_error, '') AS last_error, due_at AS died_at,
    CASE WHEN error_class IS NULL THEN '' ELSE lpad(to_hex(hashtextextended(error_class || E'\n' || transport_name || E'\n' || name || E'\n' ||
      regexp_replace(left(coalesce(last_error, ''), 1000), '"[^"]*"|''[^'']*''|` + "`[^`]*`" + `|\S*[0-9]\S*', '#', 'g'), 0)), 16, '0') END AS fingerprint
  FROM {outbox} WHERE published_at IS NULL AND due_at IS NOT NULL AND NOT held)`

// parkedLockSQL locks the lanes of the rows of a step. $1 ids.
const parkedLockSQL = `
SELECT l.lane FROM {lanes} l WHERE l.lane = ANY(ARRAY(SELECT o.lane FROM {outbox} o WHERE o.id = ANY($1::uuid[]))) ORDER BY l.lane FOR UPDATE OF l`

// parkedChosenSQL locks the rows of a step that are still parked and that the filter still selects.
const parkedChosenSQL = `
WITH chosen AS MATERIALIZED (SELECT id, seq, ordering_key FROM {letters} p WHERE {match} ORDER BY id LIMIT $7 FOR UPDATE SKIP LOCKED),`

// $10 to $13 as in deadNoted. $14 microseconds between two messages, $15 the number moved before, $16 microseconds of
// the delay.
const parkedMoveSQL = parkedChosenSQL + `
     moved AS (
       UPDATE {outbox} u SET due_at = now() + ($16::bigint + ($15::bigint + c.n - 1) * $14::bigint) * interval '1 microsecond'
       FROM (SELECT id, row_number() OVER (ORDER BY seq) AS n FROM chosen) c WHERE u.id = ANY (ARRAY[c.id]) RETURNING 1),
     changed AS (SELECT count(*) AS n FROM moved),{moveNoted}
SELECT n, (TABLE note) FROM changed
WHERE (CASE WHEN n < (SELECT count(*) FROM chosen) THEN {ignored}({outboxName}, (SELECT count(*) FROM chosen) - n)
  WHEN n > 0 AND (TABLE note) = 0 THEN {ignored}({auditName}, 1) END) IS NULL`

// The row that follows a removed one in its key is due now, if it was held. If another session has locked it, the first
// row stays: without it nothing would release the row before the time that is its safety net.
const parkedRemoveSQL = parkedChosenSQL + `
     follows AS MATERIALIZED (
       SELECT c.id AS first, n.id, n.free FROM chosen c CROSS JOIN LATERAL (
         SELECT o.id, o.held, {free} AS free FROM {outbox} o
         WHERE o.ordering_key = c.ordering_key AND o.seq > c.seq AND {waiting} AND o.id <> ALL (ARRAY(SELECT id FROM chosen))
         ORDER BY o.seq LIMIT 1) n
       WHERE c.ordering_key <> '' AND n.held),
     going AS MATERIALIZED (SELECT id FROM chosen WHERE id NOT IN (SELECT first FROM follows WHERE free IS NULL)),
     next AS MATERIALIZED (SELECT DISTINCT id FROM follows WHERE free),
     gone AS (DELETE FROM {outbox} WHERE id = ANY(ARRAY(SELECT id FROM going)) RETURNING 1),
     freed AS (UPDATE {outbox} u SET held = false, due_at = now() FROM next n WHERE u.id = ANY (ARRAY[n.id]) RETURNING 1),
     changed AS (SELECT count(*) AS n FROM gone),{removeNoted}
SELECT n, (TABLE note) FROM changed
WHERE (CASE WHEN n < (SELECT count(*) FROM going) THEN {ignored}({outboxName}, (SELECT count(*) FROM going) - n)
  WHEN (SELECT count(*) FROM freed) < (SELECT count(*) FROM next) THEN {ignored}({outboxName}, (SELECT count(*) FROM next) - (SELECT count(*) FROM freed))
  WHEN n > 0 AND (TABLE note) = 0 THEN {ignored}({auditName}, 1) END) IS NULL`
