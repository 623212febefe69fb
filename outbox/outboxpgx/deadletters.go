package outboxpgx

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/deadletter"
	"github.com/holdfast-go/holdfast/internal/outbox/stored"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/outbox"
)

// deadLetters implements outbox.DeadLetters, for dead letters and for parked messages.
type deadLetters struct {
	pool *pgxpool.Pool
	t    tables
	sql  deadStatements
	noun string // of its messages, in errors
	scan func(row pgx.CollectableRow, whole bool) (outbox.DeadLetter, error)

	wake func() // wakes a relay for the returned messages

	readTimeout, changeTimeout time.Duration
}

func newDeadLetters(pool *pgxpool.Pool, t tables, wake func()) *deadLetters {
	return &deadLetters{
		pool: pool, t: t, sql: t.deadStatements(), noun: "dead letters", scan: scanDeadLetter, wake: wake,
		readTimeout: 10 * time.Second, changeTimeout: time.Minute,
	}
}

// DeadLetters returns the dead letters of the outbox. A read may take 10 s. If the server does not answer, it is
// retried on another connection for 10 s more. Selecting dead letters for a change may take a minute twice, and each
// step of the change a minute. After that, the error is context.DeadlineExceeded. Each change is recorded with its
// author and reason: see Audit.
func (s *Store) DeadLetters() outbox.DeadLetters { return s.dead }

// List implements outbox.DeadLetters.
func (d *deadLetters) List(ctx context.Context, f outbox.Filter) ([]outbox.DeadLetter, error) {
	f.Limit = cmp.Or(f.Limit, deadletter.ListLimit)
	after, err := parseCursor(f.After)
	if err := errors.Join(err, f.CheckList()); err != nil {
		return nil, wrap("list "+d.noun, err)
	}
	scan := func(row pgx.CollectableRow) (outbox.DeadLetter, error) { return d.scan(row, f.Whole) }
	return collect(ctx, d, "list "+d.noun, scan, d.sql.list, append(filterArgs(f), deadletter.ListBytes, after.at, after.seq, f.Whole)...)
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("outboxpgx: %s: %w", what, err)
}

// collect reads the rows of an operator's query. If the server does not answer, it retries on another connection.
func collect[T any](ctx context.Context, d *deadLetters, what string, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	var found []T
	err := pgcall.Twice(ctx, d.pool, d.readTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return planned(ctx, conn, beginReadSQL, sql, args, func(q *pgx.QueuedQuery) {
			q.Query(func(rows pgx.Rows) (err error) {
				found, err = pgx.CollectRows(rows, scan)
				return err
			})
		})
	})
	return found, wrap(what, d.t.explain(err))
}

func scanDeadLetter(row pgx.CollectableRow, whole bool) (d outbox.DeadLetter, err error) {
	var r record
	var failed pgtype.Timestamptz // another program may have stored infinity: the zero time
	var seq int64
	if err := row.Scan(r.dest(&d.Class, &d.Error, &failed, &d.Fingerprint, &seq)...); err != nil {
		return d, err
	}
	m, unreadable := r.message()
	d.Message, d.Attempts, d.CreatedAt, d.FailedAt, d.Unreadable = stored.Message(m), m.Attempts, m.CreatedAt, failed.Time, unreadable
	d.Omitted, d.Cursor = !whole, cursor{failed, seq}.String()
	return d, nil
}

// Show implements outbox.DeadLetters.
func (d *deadLetters) Show(ctx context.Context, id uuid.UUID) (outbox.DeadLetter, error) {
	found, err := d.List(ctx, outbox.Filter{IDs: []uuid.UUID{id}, Whole: true})
	switch {
	case err != nil:
		return outbox.DeadLetter{}, err
	case len(found) == 0:
		return outbox.DeadLetter{}, wrap("show message "+id.String(), outbox.ErrNotFound)
	}
	return found[0], nil
}

// Count implements outbox.DeadLetters.
func (d *deadLetters) Count(ctx context.Context, f outbox.Filter) (n int, err error) {
	if err := f.Check(); err != nil {
		return 0, wrap("count "+d.noun, err)
	}
	err = pgcall.Twice(ctx, d.pool, d.readTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, d.sql.count, filterArgs(f)...).Scan(&n)
	})
	return n, wrap("count "+d.noun, d.t.explain(err))
}

// filterArgs returns the arguments of deadWhere.
func filterArgs(f outbox.Filter) []any {
	var ids uuids // nil: any
	if f.IDs != nil {
		ids = make(uuids, len(f.IDs))
	}
	for i, id := range f.IDs {
		ids[i] = pgtype.UUID{Bytes: id, Valid: true}
	}
	return []any{
		ids, nullable(f.Class), nullable(f.Name), nullable(f.Key), optional(f.FailedAfter), optional(f.FailedBefore),
		optional(f.Limit), nullable(f.ErrorContains), nullable(f.Fingerprint),
	}
}

// optional returns nil for the zero value.
func optional[T comparable](v T) *T {
	if v == *new(T) {
		return nil
	}
	return &v
}

// Groups implements outbox.DeadLetters.
func (d *deadLetters) Groups(ctx context.Context, f outbox.Filter) ([]outbox.Group, error) {
	limit := cmp.Or(f.Limit, deadletter.GroupsLimit)
	f.Limit = min(f.Limit, 0) // the limit applies to groups, not dead letters; Check rejects a negative one
	if err := f.Check(); err != nil {
		return nil, wrap("group "+d.noun, err)
	}
	return collect(ctx, d, "group "+d.noun, scanGroup, d.sql.groups, append(filterArgs(f), limit)...)
}

func scanGroup(row pgx.CollectableRow) (g outbox.Group, err error) {
	s := &g.Sample
	var id [16]byte
	var key pgtype.Text
	var first, last, created, failed pgtype.Timestamptz // an infinite time becomes the zero time
	err = row.Scan(&g.Count, &first, &last, &id, &s.Message.Name, &key, &s.Message.Transport, &created, &s.Attempts,
		&s.Class, &s.Error, &failed, &s.Fingerprint)
	g.First, g.Last, g.Fingerprint = first.Time, last.Time, s.Fingerprint
	s.Message.ID, s.Message.Key, s.CreatedAt, s.FailedAt, s.Omitted = id, key.String, created.Time, failed.Time, true
	return g, err
}

// Replay implements outbox.DeadLetters.
func (d *deadLetters) Replay(ctx context.Context, f outbox.Filter, r outbox.Replay) (outbox.Replayed, error) {
	if err := r.CheckDead(); err != nil {
		return outbox.Replayed{}, wrap("replay dead letters", err)
	}
	done, err := deadletter.InSteps(ctx, &change{deadLetters: d, by: r.By, reason: r.Reason, chosenBy: f}, f, r)
	return done, wrap("replay dead letters", err)
}

// Remove implements outbox.DeadLetters.
func (d *deadLetters) Remove(ctx context.Context, f outbox.Filter, r outbox.Removal) (int, error) {
	n, err := deadletter.RemoveInSteps(ctx, &change{deadLetters: d, by: r.By, reason: r.Reason, chosenBy: f}, f, r)
	return n, wrap("remove dead letters", err)
}

// change is one Replay or Remove, with the data for its audit entry. It is a deadletter.Store.
type change struct {
	*deadLetters
	by, reason string
	chosenBy   outbox.Filter
	entry      int // id of the audit entry; 0: none yet
}

// ID implements deadletter.Store.
func (c *change) ID(m outbox.Message) uuid.UUID { return m.ID }

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

// Preview implements deadletter.Store.
func (c *change) Preview(ctx context.Context, f outbox.Filter, r outbox.Replay) (counts outbox.Replayed, err error) {
	args := append(filterArgs(f), deadletter.Retention.Microseconds(), r.Force)
	err = pgcall.Twice(ctx, c.pool, c.readTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return queryPlanned(ctx, conn, beginReadSQL, c.sql.preview, args, []any{&counts.Returned, &counts.Outlived, &counts.Failed})
	})
	return counts, c.t.explain(err)
}

// ids reads one row whose first column has ids.
func (c *change) ids(ctx context.Context, sql string, args []any, more ...any) ([]uuid.UUID, error) {
	var found uuids
	err := pgcall.Twice(ctx, c.pool, c.changeTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return queryPlanned(ctx, conn, beginReadSQL, sql, args, append([]any{&found}, more...))
	})
	if err != nil {
		return nil, c.t.explain(err)
	}
	ids := make([]uuid.UUID, len(found))
	for i, id := range found {
		ids[i] = id.Bytes
	}
	return ids, nil
}

// Return implements deadletter.Store. If a message with one of the ids was written during the step, the step fails.
// It is tried once more, and then sees that message.
func (c *change) Return(ctx context.Context, s deadletter.Step, r outbox.Replay) (moved outbox.Replayed, err error) {
	for range 2 {
		err = c.step(ctx, c.sql.replay, s.Filter, []any{r.Between().Microseconds(), s.Before, s.Bodies}, &moved.Returned, &moved.Failed)
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
func (c *change) Delete(ctx context.Context, f outbox.Filter) (n int, err error) {
	err = c.step(ctx, c.sql.remove, f, nil, &n)
	return n, err
}

// step runs a statement that changes dead letters and writes the audit entry, in one round trip. No lock therefore
// outlives a connection that stops answering. It scans the statement's one row into counts; after an error they are
// unchanged.
func (c *change) step(ctx context.Context, sql string, f outbox.Filter, more []any, counts ...*int) error {
	chosenBy, err := json.Marshal(c.chosenBy)
	if err != nil {
		return fmt.Errorf("encode the filter: %w", err)
	}
	args := append(append(filterArgs(f), c.entry, c.by, c.reason, string(chosenBy)), more...)
	counts = append(counts, &c.entry)
	got, dest := make([]int, len(counts)), make([]any, len(counts))
	for i := range got {
		dest[i] = &got[i]
	}
	err = pgcall.Within(ctx, c.pool, c.changeTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		queue := &pgx.Batch{}
		queue.Queue(beginSQL)
		queue.Queue(deadPlansSQL)
		if c.sql.lock != "" {
			queue.Queue(c.sql.lock, args[0])
		}
		queue.Queue(sql, args...).QueryRow(func(row pgx.Row) error { return row.Scan(dest...) })
		queue.Queue(commitSQL)
		return conn.SendBatch(ctx, queue).Close()
	})
	if err != nil {
		return c.t.explain(err)
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

// planned runs a statement with deadPlansSQL in a transaction, in one round trip. read receives its rows.
func planned(ctx context.Context, conn *pgxpool.Conn, begin, sql string, args []any, read func(*pgx.QueuedQuery)) error {
	queue := &pgx.Batch{}
	queue.Queue(begin)
	queue.Queue(deadPlansSQL)
	read(queue.Queue(sql, args...))
	queue.Queue(commitSQL)
	return conn.SendBatch(ctx, queue).Close()
}

// cursor is the position of a row in a list: the time by which the list is sorted first, and seq. Its text form is
// "microseconds.seq", with names for infinite times.
type cursor struct {
	at  pgtype.Timestamptz
	seq int64
}

// start is the position before every row.
var start = cursor{pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}, math.MinInt64}

func (c cursor) String() string {
	at := c.at.InfinityModifier.String()
	if c.at.InfinityModifier == pgtype.Finite {
		at = strconv.FormatInt(c.at.Time.UnixMicro(), 10)
	}
	return at + "." + strconv.FormatInt(c.seq, 10)
}

// parseCursor parses a cursor; "" is the start.
func parseCursor(text string) (cursor, error) {
	if text == "" {
		return start, nil
	}
	at, seq, _ := strings.Cut(text, ".")
	c := cursor{at: pgtype.Timestamptz{Valid: true}}
	var err1, err2 error
	switch at {
	case pgtype.Infinity.String():
		c.at.InfinityModifier = pgtype.Infinity
	case pgtype.NegativeInfinity.String():
		c.at.InfinityModifier = pgtype.NegativeInfinity
	default:
		var micro int64
		micro, err1 = strconv.ParseInt(at, 10, 64)
		c.at.Time = time.UnixMicro(micro)
	}
	c.seq, err2 = strconv.ParseInt(seq, 10, 64)
	if err1 != nil || err2 != nil {
		return c, fmt.Errorf("%.80q is not a list cursor", text)
	}
	return c, nil
}

// auditRetention is how long entries of the audit are kept.
const auditRetention = 365 * 24 * time.Hour

// auditLimit is the number of entries that an Audit without a limit returns.
const auditLimit = 100

// AuditEntry records one Replay or Remove that changed dead letters.
type AuditEntry struct {
	// At is the time of the change, by the database's clock.
	At time.Time
	// By and Reason are the values of the call.
	By, Reason string
	// Action is "replay", "edit" for a replay that replaced bodies, or "remove".
	Action string
	// Count is the number of changed dead letters.
	Count int
	// Filter is the filter that selected them.
	Filter outbox.Filter
	// Unreadable is the reason why Filter is missing: another program wrote the entry. Nil: Filter is set.
	Unreadable error
}

// Audit returns the newest entries, newest first. A limit of 0 means 100. An entry is written in the transaction of
// the change's first step, updated in the transactions of the later steps, and kept for a year. Audit returns an
// error for a negative limit.
func (s *Store) Audit(ctx context.Context, limit int) ([]AuditEntry, error) {
	if limit < 0 {
		return nil, fmt.Errorf("outboxpgx: audit: the limit is %d, want 0 or more", limit)
	}
	if limit == 0 {
		limit = auditLimit
	}
	return collect(ctx, s.dead, "audit", scanAudit, s.dead.sql.audit, limit)
}

func scanAudit(row pgx.CollectableRow) (AuditEntry, error) {
	var e AuditEntry
	var chosenBy []byte
	var at pgtype.Timestamptz // another program may have stored infinity: the zero time
	if err := row.Scan(&at, &e.By, &e.Reason, &e.Action, &e.Count, &chosenBy); err != nil {
		return e, err
	}
	e.At = at.Time
	var filter outbox.Filter
	if err := json.Unmarshal(chosenBy, &filter); err != nil {
		e.Unreadable = fmt.Errorf("filter: %w", err)
		return e, nil
	}
	e.Filter = filter
	return e, nil
}

// deadStatements has the SQL of operators' lists, with the table names filled in.
type deadStatements struct {
	list, count, groups, selected, returnable, preview, replay, remove, audit string

	lock    string // precedes replay and remove; empty: nothing does
	waiting string
	row     string
}

func (t tables) deadStatements() deadStatements {
	fill := func(sql string) string {
		parts := strings.NewReplacer("{where}", deadWhere, "{match}", deadMatch, "{again}", deadAgain, "{letters}", "{dead}",
			"{replayNoted}", strings.ReplaceAll(deadNoted, "{action}", "CASE WHEN $16::bytea[] IS NULL THEN 'replay' ELSE 'edit' END"),
			"{removeNoted}", strings.ReplaceAll(deadNoted, "{action}", "'remove'"),
			"{fits}", strings.ReplaceAll(fits, "{max}", "$10::bigint"),
			"{record}", recordWith("$13::boolean"))
		return t.fill(parts.Replace(parts.Replace(sql)))
	}
	waiting := strings.NewReplacer("{fits}", strings.ReplaceAll(fits, "{max}", "$4::bigint"), "{record}", recordWithoutBody()).Replace(waitingSQL)
	return deadStatements{
		list: fill(deadListSQL), count: fill(deadCountSQL), groups: fill(deadGroupsSQL), selected: fill(deadSelectedSQL),
		returnable: fill(deadReturnableSQL), preview: fill(deadPreviewSQL), replay: fill(deadReplaySQL), remove: fill(deadRemoveSQL),
		audit: fill(auditSQL), waiting: t.fill(waiting),
		row: t.fill(strings.NewReplacer("{fits}", strings.ReplaceAll(fits, "{max}", "$2::bigint"), "{record}", recordWith("true")).Replace(rowSQL)),
	}
}

// deadWhere is the filter of dead letters. A null argument does not filter. $1 ids, $2 class,
// $3 name, $4 key, $5 and $6 the times between which they failed, $7 limit, $8 a part of the error, $9 fingerprint.
const deadWhere = deadMatch + `
ORDER BY died_at, seq LIMIT $7`

const deadMatch = `
  ($1::uuid[] IS NULL OR id = ANY($1)) AND ($2::text IS NULL OR error_class = $2) AND ($3::text IS NULL OR name = $3)
  AND ($4::text IS NULL OR ordering_key = $4) AND ($5::timestamptz IS NULL OR died_at >= $5) AND ($6::timestamptz IS NULL OR died_at < $6)
  AND ($8::text IS NULL OR position(lower($8) IN lower(last_error)) > 0) AND ($9::text IS NULL OR fingerprint = $9)`

// $10 bytes of all bodies, $11 and $12 the position where the list starts, $13 whether bodies and headers are wanted.
const deadListSQL = `
SELECT {record}, left(error_class, 100), left(last_error, 1000), died_at, fingerprint, seq
FROM (SELECT d.*, fits AS texts, fits AND (NOT $13 OR sum(octet_length(body)) FILTER (WHERE fits) OVER (ORDER BY died_at, seq) <= $10) AS whole
      FROM (SELECT o.*, {fits} AS fits FROM {letters} o WHERE (died_at, seq) > ($11::timestamptz, $12::bigint) AND {where}) d) d
ORDER BY died_at, seq`

const deadCountSQL = `SELECT count(*) FROM (SELECT FROM {letters} o WHERE {where}) d`

// $10 groups. The sample is the latest dead letter of its kind. Infinite times, from other programs, do not count. The index
// finds the sample, because a sort of 100,000 dead letters takes three times as long as the rest.
const deadGroupsSQL = `
WITH kinds AS MATERIALIZED (
  SELECT fingerprint, count(*) AS n, min(died_at) FILTER (WHERE isfinite(died_at)) AS first, max(died_at) FILTER (WHERE isfinite(died_at)) AS last,
    max(died_at) AS largest
  FROM {letters} o WHERE {match} GROUP BY fingerprint ORDER BY n DESC, fingerprint LIMIT least($7::bigint, $10::bigint))
SELECT k.n, k.first, k.last, s.id, left(s.name, 128), left(s.ordering_key, 1000), left(s.transport_name, 128), s.created_at, s.attempts,
  left(s.error_class, 100), left(s.last_error, 1000), s.died_at, s.fingerprint
FROM kinds k CROSS JOIN LATERAL (
  SELECT * FROM {letters} d WHERE d.died_at = coalesce(k.last, k.largest) AND d.fingerprint = k.fingerprint AND {match} ORDER BY d.seq DESC LIMIT 1) s
ORDER BY k.n DESC, k.fingerprint`

// deadPlansSQL makes Postgres find dead letters by index. The tables are often empty when they are analysed, and have
// very many rows a moment later. No single plan fits all filters, because null arguments do not filter. Postgres
// would keep a plan from the time when the table was empty, and read the whole table for every page. For the same
// reason the statements do not join tables: a plan for few rows compares all rows with all.
const deadPlansSQL = `
SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)`

const beginReadSQL = `BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY`

// deadReturnableSQL divides dead letters d for a replay. Outlived ones stay because they were stored more than $10
// microseconds ago, unless $11 forces them. Those in again stay because the outbox has their id. The others can be
// returned.
const deadReturnableSQL = `
WITH outlived AS MATERIALIZED (SELECT FROM {dead} d WHERE NOT $11::boolean AND created_at < now() - $10::bigint * interval '1 microsecond' AND {where}),
     again AS MATERIALIZED (SELECT FROM {dead} d WHERE ($11 OR created_at >= now() - $10 * interval '1 microsecond') AND {again} AND {where}),
     others AS MATERIALIZED (SELECT id, seq FROM {dead} d WHERE ($11 OR created_at >= now() - $10 * interval '1 microsecond') AND NOT ({again}) AND {where})
SELECT (SELECT coalesce(array_agg(id ORDER BY seq), '{}') FROM others), (SELECT count(*) FROM outlived), (SELECT count(*) FROM again)`

// deadPreviewSQL counts the dead letters that a replay would return, the outlived ones, and those in again.
const deadPreviewSQL = `
SELECT least(count(*) FILTER (WHERE NOT outlived AND NOT again), $7), least(count(*) FILTER (WHERE outlived), $7), least(count(*) FILTER (WHERE again AND NOT outlived), $7)
FROM (SELECT NOT $11::boolean AND created_at < now() - $10::bigint * interval '1 microsecond' AS outlived, {again} AS again FROM {dead} d WHERE {match} OFFSET 0) d`

// deadAgain searches for each dead letter separately, which an EXISTS may not do.
const deadAgain = `(SELECT true FROM {outbox} o WHERE o.id = d.id LIMIT 1) IS NOT NULL`

const deadSelectedSQL = `SELECT coalesce(array_agg(id ORDER BY died_at, seq), '{}') FROM (SELECT id, died_at, seq FROM {letters} o WHERE {where}) d`

// deadNoted writes the audit entry if any rows changed: one entry for a change of many steps. $10 the id of the entry
// from earlier steps, $11 the author, $12 the reason, $13 the filter.
const deadNoted = `
     counted AS (UPDATE {audit} a SET count = a.count + n FROM changed WHERE a.id = $10::bigint RETURNING a.id),
     noted AS (
       INSERT INTO {audit} (actor, reason, action, count, filter)
       SELECT $11::text, $12::text, {action}, n, $13::text::jsonb FROM changed WHERE n > 0 AND NOT EXISTS (SELECT FROM counted) RETURNING id),
     note AS (SELECT coalesce((SELECT id FROM counted), (SELECT id FROM noted), 0))`

// If a table ignores a change, the statement fails. Otherwise a dead letter that left its table without arriving in
// the outbox would be lost.
//
// The rows are locked in one order before they are deleted, so that two replays do not return one dead letter twice.
// The second replay waits, so it returns nothing before the first. $14 microseconds between two messages, $15 the
// number returned before, $16 the new bodies of $1 if they are edited.
const deadReplaySQL = `
WITH again AS MATERIALIZED (SELECT FROM {dead} d WHERE {again} AND {match}),
     chosen AS MATERIALIZED (SELECT id FROM {dead} d WHERE NOT ({again}) AND {match} ORDER BY id LIMIT $7 FOR UPDATE),
     gone AS (DELETE FROM {dead} WHERE id = ANY(ARRAY(SELECT id FROM chosen)) RETURNING *),
     back AS (
       INSERT INTO {outbox} ({columns}, created_at, due_at)
       SELECT id, lane, name, coalesce(edited_body, body), content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers,
              created_at, CASE WHEN $14::bigint > 0 THEN now() + ($15::bigint + row_number() OVER (ORDER BY seq) - 1) * $14::bigint * interval '1 microsecond' END
       FROM gone LEFT JOIN unnest(CASE WHEN $16::bytea[] IS NOT NULL THEN $1::uuid[] END, $16::bytea[]) AS edited (edited_id, edited_body) ON edited_id = id
       ORDER BY seq RETURNING 1),
     changed AS (SELECT count(*) AS n FROM back),{replayNoted}
SELECT n, (SELECT count(*) FROM again), (TABLE note) FROM changed
WHERE (CASE WHEN (SELECT count(*) FROM gone) < (SELECT count(*) FROM chosen) THEN {ignored}({deadName}, (SELECT count(*) FROM chosen) - (SELECT count(*) FROM gone))
  WHEN n < (SELECT count(*) FROM gone) THEN {ignored}({outboxName}, (SELECT count(*) FROM gone) - n)
  WHEN n > 0 AND (TABLE note) = 0 THEN {ignored}({auditName}, 1) END) IS NULL`

const deadRemoveSQL = `
WITH chosen AS MATERIALIZED (SELECT id FROM {dead} WHERE {match} ORDER BY id LIMIT $7 FOR UPDATE),
     gone AS (DELETE FROM {dead} WHERE id = ANY(ARRAY(SELECT id FROM chosen)) RETURNING 1),
     changed AS (SELECT count(*) AS n FROM gone),{removeNoted}
SELECT n, (TABLE note) FROM changed
WHERE (CASE WHEN n < (SELECT count(*) FROM chosen) THEN {ignored}({deadName}, (SELECT count(*) FROM chosen) - n)
  WHEN n > 0 AND (TABLE note) = 0 THEN {ignored}({auditName}, 1) END) IS NULL`

const auditSQL = `SELECT at, actor, reason, action, count, filter FROM {audit} ORDER BY id DESC LIMIT $1`
