package outboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/deadletter"
	"github.com/holdfast-go/holdfast/internal/isolate"
	"github.com/holdfast-go/holdfast/internal/outbox/stored"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// How messages wait. A row is ready (no due_at) or waiting (with a due_at). A waiting row holds back the later rows
// of its key, which pass through these states:
//
//   - ready: claims find them and leave them out. This is enough to keep the order.
//   - held: the claim that found them sets a due_at far in the future. They leave the index that claims
//     walk, so each costs a claim only once.
//   - ready again: when the first waiting row of the key is released, some of the rows held behind it are released
//     with it. The next row after them gets its own due_at in the near future, so that it follows soon.
//
// The invariant: the first waiting row of a key has its own due time. Holding and releasing preserve this. They lock
// the lanes first and read the rows after that.

const (
	// dueRows is the maximum number of due rows per transaction.
	dueRows = 500
	// releaseRows is the maximum number of held rows that one transaction releases. keyRows is the maximum for
	// one key: more than a relay can publish before the next portion follows, and few enough to be held again.
	releaseRows, keyRows = 5000, 500
	// probeRows is the number of held rows released together with a row that may fail again.
	probeRows = 10
	// followAfter is the time until the next portion of a key follows.
	followAfter = 100 * time.Millisecond
	// holdRows is the maximum number of rows of a lane that one transaction reads to hold them.
	holdRows = 1000
)

// nextDue is the time when the first waiting row is due, according to the last claim.
type nextDue struct {
	mu sync.Mutex
	at time.Time // zero: none waits
}

func (n *nextDue) set(at time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.at = at
}

// passed reports whether a row is due.
func (n *nextDue) passed() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.at.IsZero() && !time.Now().Before(n.at)
}

// release makes due rows ready. If the server refuses, release finds the rows at fault by splitting in halves, and
// makes the others ready. It then returns the reason for one of the refused rows.
func (s *Store) release(ctx context.Context) error {
	skip := s.refusedDue.skip()
	err := s.releaseSome(ctx, skip, nil)
	if !sqlstate.Refused(err) {
		return cmp.Or(err, s.refusedDue.err())
	}
	ids, err := s.dueRows(ctx, skip)
	if err != nil {
		return err
	}
	search := isolate.New(isolate.Halves, ids...)
	for group := search.Next(len(ids)); group != nil; group = search.Next(len(ids)) {
		err := s.releaseSome(ctx, skip, group)
		switch {
		case err == nil:
			search.Clear(group...)
		case !sqlstate.Refused(err):
			return err
		case search.Failed(group...):
			s.refusedDue.add(group[0], s.t.explain(err))
		}
	}
	return s.refusedDue.err()
}

// dueRows returns the ids of the rows that a release would make ready.
func (s *Store) dueRows(ctx context.Context, skip uuids) (ids []pgtype.UUID, err error) {
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(s.sql.due, dueRows, skip, nil).Query(func(rows pgx.Rows) (err error) {
		ids, err = pgx.CollectRows(rows, pgx.RowTo[pgtype.UUID])
		return err
	})
	queue.Queue(commitSQL)
	return ids, s.send(ctx, queue)
}

// releaseSome makes due rows ready in a separate transaction: all except skip, or only the rows in only.
func (s *Store) releaseSome(ctx context.Context, skip, only uuids) error {
	return s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			return s.releaseIn(ctx, tx, skip, only)
		})
	})
}

func (s *Store) releaseIn(ctx context.Context, tx pgx.Tx, skip, only uuids) error {
	var lanes []int16
	queue := &pgx.Batch{}
	queue.Queue(settingsSQL)
	queue.Queue(asyncCommitSQL)
	queue.Queue(s.sql.lockDue, dueRows, skip, only).Query(func(rows pgx.Rows) (err error) {
		lanes, err = pgx.CollectRows(rows, pgx.RowTo[int16])
		return err
	})
	if err := tx.SendBatch(ctx, queue).Close(); err != nil || len(lanes) == 0 {
		return err
	}
	queue = &pgx.Batch{}
	queue.Queue(s.sql.holdDue, lanes, dueRows, skip, only)
	queue.Queue(s.sql.release, lanes, dueRows, releaseRows, keyRows, probeRows, followAfter.Microseconds(), skip, only)
	return tx.SendBatch(ctx, queue).Close()
}

// refusedDue holds due rows that the server refuses to change. Releases leave each of them out for a while.
type refusedDue struct {
	mu   sync.Mutex
	byID map[pgtype.UUID]refusedRow
}

type refusedRow struct {
	reason error
	tried  time.Time
}

// skip returns the rows to leave out, and forgets the rows whose retry is due.
func (r *refusedDue) skip() uuids {
	r.mu.Lock()
	defer r.mu.Unlock()
	ids := uuids{}
	for id, row := range r.byID {
		if time.Since(row.tried) >= retryRefused {
			delete(r.byID, id)
			continue
		}
		ids = append(ids, id)
	}
	return ids
}

func (r *refusedDue) add(id pgtype.UUID, reason error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byID == nil {
		r.byID = map[pgtype.UUID]refusedRow{}
	}
	r.byID[id] = refusedRow{reason, time.Now()}
}

// err returns an error that names one of the rows, or nil if there is none.
func (r *refusedDue) err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, row := range r.byID {
		return fmt.Errorf("outboxpgx: could not release %d due messages; message %s: %w", len(r.byID), uuid.UUID(id.Bytes), row.reason)
	}
	return nil
}

// hold holds the rows that a claim found behind a waiting row.
func (s *Store) hold(ctx context.Context, b driver.Batch, skip []string) error {
	lanes, tokens := columnsOfLeases(b.Leases)
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(asyncCommitSQL)
	queue.Queue(s.sql.lock, lanes, tokens)
	queue.Queue(s.sql.holdReady, tokens[0], holdRows, skip)
	queue.Queue(commitSQL)
	return s.send(ctx, queue)
}

// Waiting returns the messages that f selects, without their bodies. Like a read of dead letters, it may take 10 s, and
// 10 s more on another connection. Messages below a wrong floor are missing until a claim has corrected the floor.
func (s *Store) Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error) {
	limit := cmp.Or(f.Limit, deadletter.ListLimit)
	after, err := parseCursor(f.After)
	if err := errors.Join(err, outbox.Filter{Name: f.Name, Key: f.Key, Limit: limit}.Check()); err != nil {
		return nil, wrap("list messages", err)
	}
	return collect(ctx, s.dead, "list messages", scanWaiting, s.dead.sql.waiting, nullable(f.Name), nullable(f.Key), limit, deadletter.ListBytes, after.seq)
}

func scanWaiting(row pgx.CollectableRow) (w outbox.Waiting, err error) {
	var r record
	var seq int64
	if err := row.Scan(r.dest(&w.Class, &w.Error, &seq)...); err != nil {
		return w, err
	}
	m, unreadable := r.message()
	w.Message, w.Attempts, w.CreatedAt, w.Unreadable = stored.Message(m), m.Attempts, m.CreatedAt, unreadable
	w.Cursor = cursor{start.at, seq}.String()
	return w, nil
}

// Look returns what the outbox knows of one message. The row of a published message is deleted after Config.Retention. The
// error is outbox.ErrNotFound if there is no row, also for a dead letter. Like a read of dead letters, Look may take 10 s,
// and 10 s more on another connection.
func (s *Store) Look(ctx context.Context, id uuid.UUID) (driver.Known, error) {
	rows, err := collect(ctx, s.dead, "look at a message", scanKnown, s.dead.sql.row, pgtype.UUID{Bytes: id, Valid: true}, deadletter.ListBytes)
	switch {
	case err != nil:
		return driver.Known{}, err
	case len(rows) == 0:
		return driver.Known{}, wrap("look at message "+id.String(), outbox.ErrNotFound)
	}
	return rows[0], nil
}

// Retention returns Config.Retention.
func (s *Store) Retention() time.Duration { return s.cfg.Retention }

func scanKnown(row pgx.CollectableRow) (k driver.Known, err error) {
	var r record
	var due, published pgtype.Timestamptz // another program may have stored infinity: the zero time
	if err := row.Scan(r.dest(&k.Class, &k.Error, &due, &published)...); err != nil {
		return k, err
	}
	k.Message, _ = r.message() // an unreadable one has the fields that could be decoded
	k.DueAt, k.PublishedAt = due.Time, published.Time
	return k, nil
}

// heldUntil is the due time of a row that is held behind a row p. It is a safety net, some time after p is due.
// Normally the release of p also releases the row.
const heldUntil = `CASE WHEN p.held AND p.due_at > now() + interval '30 minutes' THEN p.due_at
  ELSE least(greatest(p.due_at, now()), now() + interval '1 year') + interval '1 hour' END`

// dueRowsSQL selects the rows for a release: due and free rows, all except skip, or only the rows in only. See
// refusedDue.
const dueRowsSQL = `{waiting} AND o.due_at <= now() AND o.id <> ALL({skip}::uuid[]) AND ({only}::uuid[] IS NULL OR o.id = ANY({only}::uuid[])) AND {free}`

// lockDueSQL locks and returns the lanes of due rows, without busy lanes. $1 limit of rows, $2 ids to skip, $3 the
// only ids, or NULL.
const lockDueSQL = `
WITH due AS MATERIALIZED (SELECT o.lane FROM {outbox} o WHERE {dueRows} ORDER BY o.due_at LIMIT $1)
SELECT l.lane FROM {lanes} l WHERE l.lane IN (SELECT lane FROM due) ORDER BY l.lane FOR UPDATE OF l SKIP LOCKED`

// heldSQL holds the rows of behind. It fails if the table ignores the whole change.
const heldSQL = `held AS (
  UPDATE {outbox} u SET held = true, due_at = {heldUntil} FROM behind p WHERE u.id = ANY (ARRAY[p.id]) AND p.found > 0 RETURNING 1)
SELECT CASE WHEN EXISTS (SELECT FROM behind) AND NOT EXISTS (SELECT FROM held) THEN {ignored}({outboxName}, (SELECT count(*) FROM behind)) END`

// dueSQL returns due rows. $1 limit, $2 ids to skip, $3 the only ids, or NULL.
const dueSQL = `SELECT o.id FROM {outbox} o WHERE {dueRows} ORDER BY o.due_at LIMIT $1`

// holdDueSQL holds the due rows that are behind a waiting row of their key. $1 lanes, $2 limit of rows, $3 ids to
// skip, $4 the only ids, or NULL.
//
// The count reads its whole input before it returns a row, so all scans precede the first write. Otherwise each scan
// walks over the rows that the statement has written, and 1,000 rows of a key take three times as long. MATERIALIZED
// is not enough, because it is read row by row.
//
// "= ANY (ARRAY[p.id])" means "= p.id", but the planner cannot use it for a merge join. With "=", a planner that
// believes the table is empty, as it was when last analysed, reads the whole table for each of a few rows.
const holdDueSQL = `
WITH due AS MATERIALIZED (
  SELECT o.id, o.seq, o.ordering_key FROM {outbox} o WHERE o.lane = ANY($1::smallint[]) AND {dueRows} ORDER BY o.due_at LIMIT $2),
behind AS MATERIALIZED (
  SELECT o.id, p.due_at, p.held, count(*) OVER () AS found
  FROM due o CROSS JOIN LATERAL (SELECT p.due_at, p.held FROM {outbox} p WHERE {before}) p),
{held}`

// holdReadySQL holds the ready rows that are behind a waiting row of their key. $1 token, $2 limit of rows per lane,
// $3 transports to skip.
const holdReadySQL = `
WITH behind AS MATERIALIZED (
  SELECT o.id, p.due_at, p.held, count(*) OVER () AS found
  FROM {lanes} l
    CROSS JOIN LATERAL (
      SELECT o.id, o.seq, o.ordering_key FROM {outbox} o
      WHERE o.lane = l.lane AND o.seq >= l.floor AND {ready} AND o.transport_name <> ALL($3::text[]) AND {free} ORDER BY o.seq LIMIT $2) o
    CROSS JOIN LATERAL (SELECT p.due_at, p.held FROM {outbox} p WHERE {before}) p
  WHERE l.token = $1),
{held}`

// releaseSQL releases two kinds of rows: due rows that are the first of their key (head), and the rows held behind
// them, up to the next row that waits for its own due time (behind). If too many rows are behind, the first row over
// the limit gets its own due time, so that it follows later. If another session has locked a row behind the head
// (stuck), that row cannot get a due time, so the head gets one instead. The floor of a lane is lowered to its
// released rows.
//
// $1 lanes, $2 limit of due rows, $3 limit of all rows behind, $4 limit per key, $5 limit behind a row that was not
// held, $6 microseconds until the rest follows, $7 ids to skip, $8 the only ids, or NULL. The statement fails if the
// table ignores a part of the changes.
const releaseSQL = `
WITH due AS MATERIALIZED (
  SELECT o.id, o.seq, o.ordering_key, o.held FROM {outbox} o WHERE o.lane = ANY($1::smallint[]) AND {dueRows} ORDER BY o.due_at LIMIT $2),
head AS MATERIALIZED (SELECT o.* FROM due o WHERE (SELECT true FROM {outbox} p WHERE {before}) IS NULL),
most AS MATERIALIZED (SELECT greatest(1, least($4::int, $3::int / greatest(1, count(*)::int))) AS n FROM head),
behind AS MATERIALIZED (
  SELECT b.head, b.id, b.n > b.most AS late, b.free
  FROM (SELECT h.*, CASE WHEN h.held THEN m.n ELSE least(m.n, $5::int) END AS most FROM head h CROSS JOIN most m WHERE h.ordering_key <> '') h
    CROSS JOIN LATERAL (
      SELECT h.id AS head, w.id, w.free, h.most, row_number() OVER (ORDER BY w.seq) AS n, bool_and(w.held OR w.due_at <= now()) OVER (ORDER BY w.seq) AS along
      FROM (SELECT o.id, o.seq, o.held, o.due_at, {free} AS free FROM {outbox} o WHERE o.ordering_key = h.ordering_key AND o.seq > h.seq AND {waiting}
            ORDER BY o.seq LIMIT h.most + 1) w) b
  WHERE b.along),
stuck AS MATERIALIZED (SELECT head FROM behind WHERE free IS NULL),
wanted AS MATERIALIZED (
  SELECT id, id IN (SELECT head FROM stuck) AS late FROM head
  UNION ALL SELECT id, late FROM behind WHERE head NOT IN (SELECT head FROM stuck)),
back AS (
  UPDATE {outbox} u SET held = b.late, due_at = CASE WHEN b.late THEN now() + $6::bigint * interval '1 microsecond' END
  FROM wanted b WHERE u.id = ANY (ARRAY[b.id])
  RETURNING u.lane, u.seq),
low AS MATERIALIZED (SELECT lane, min(seq) AS seq FROM back GROUP BY lane),
lowered AS (UPDATE {lanes} l SET floor = least(l.floor, low.seq) FROM low WHERE l.lane = low.lane RETURNING 1)
SELECT CASE WHEN (SELECT count(*) FROM back) < (SELECT count(*) FROM wanted) THEN {ignored}({outboxName}, (SELECT count(*) FROM wanted) - (SELECT count(*) FROM back))
  WHEN (SELECT count(*) FROM lowered) < (SELECT count(*) FROM low) THEN {ignored}({lanesName}, (SELECT count(*) FROM low) - (SELECT count(*) FROM lowered)) END`

// waitingSQL lists ready and held rows. $1 name, $2 key, $3 limit, $4 bytes of a readable body, $5 the seq after which the list
// starts. Each lane is walked from its start to the limit. All held rows are read.
const waitingSQL = `
SELECT {record}, coalesce(left(error_class, 100), ''), coalesce(left(last_error, 1000), ''), seq
FROM (SELECT w.*, fits AS texts, fits AS whole
      FROM (
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
        ORDER BY seq LIMIT $3) w) w
ORDER BY seq`

// $1 id, $2 bytes of the body.
const rowSQL = `
SELECT {record}, coalesce(left(error_class, 100), ''), coalesce(left(last_error, 1000), ''), CASE WHEN NOT held THEN due_at END, published_at
FROM (SELECT o.*, {fits} AS texts, {fits} AS whole FROM {outbox} o WHERE id = $1::uuid) o`
