package outboxpgx

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// A message that waits holds back the later ones of its key. These are ready rows at first, and the
// claims that meet them leave them out; then they are held, which takes them out of the index that
// claims walk, so that each is paid for once. When the first waiting row of a key is released, some of
// those held behind it come along, and the one after them gets a due time of its own, so that it
// follows soon. This is what must stay true: of the waiting rows of a key, the first has a due time
// of its own. Whoever holds or releases rows has locked their lanes, and looks at them after that.
//
// Order does not depend on it: a claim leaves out every row that is behind a waiting one.

const (
	// dueRows is how many rows that are due one transaction looks at.
	dueRows = 500
	// releaseRows is how many rows one transaction releases at most besides, and keyRows how many of
	// a key: far more than can be published until the next ones follow, and few enough to be held
	// again.
	releaseRows, keyRows = 5000, 500
	// probeRows is how many come with a row that may fail again.
	probeRows = 10
	// followAfter is when the next ones follow.
	followAfter = 100 * time.Millisecond
	// holdRows is how many rows of a lane one transaction looks at to hold them.
	holdRows = 1000
)

// net is the due time of a row that is held behind p: a safety net, for nobody is expected to release
// it by that time.
const net = `CASE WHEN p.held AND p.due_at > now() + interval '30 minutes' THEN p.due_at
  ELSE least(greatest(p.due_at, now()), now() + interval '1 year') + interval '1 hour' END`

// Locks the lanes of rows that are due, but not those that are busy. $1 rows.
const overdueSQL = `
WITH due AS MATERIALIZED (SELECT o.lane FROM {outbox} o WHERE {waiting} AND o.due_at <= now() ORDER BY o.due_at LIMIT $1)
SELECT l.lane FROM {lanes} l WHERE l.lane IN (SELECT lane FROM due) ORDER BY l.lane FOR UPDATE OF l SKIP LOCKED`

// Holds the rows that are due behind a waiting one of their key. $1 lanes, $2 rows.
const holdDueSQL = `
WITH due AS MATERIALIZED (
  SELECT o.id, o.seq, o.ordering_key FROM {outbox} o WHERE {waiting} AND o.due_at <= now() AND o.lane = ANY($1::smallint[]) ORDER BY o.due_at LIMIT $2)
UPDATE {outbox} u SET held = true, due_at = {net}
FROM due o CROSS JOIN LATERAL (SELECT p.due_at, p.held FROM {outbox} p WHERE {before}) p
WHERE u.id = o.id`

// Holds the ready rows that are behind a waiting one of their key. $1 token, $2 rows of a lane, $3
// transports to skip.
const holdSQL = `
UPDATE {outbox} u SET held = true, due_at = {net}
FROM {lanes} l
  CROSS JOIN LATERAL (
    SELECT o.id, o.seq, o.ordering_key FROM {outbox} o
    WHERE o.lane = l.lane AND o.seq >= l.floor AND {ready} AND o.transport_name <> ALL($3::text[]) ORDER BY o.seq LIMIT $2) o
  CROSS JOIN LATERAL (SELECT p.due_at, p.held FROM {outbox} p WHERE {before}) p
WHERE l.token = $1 AND u.id = o.id`

// Releases the rows that are due and the first of their key, and the held ones behind them up to the
// next that waits on its own account; the first that is too many follows later. The floor of a lane
// goes down to the rows that come back, with whatever value it has by then.
// $1 lanes, $2 rows, $3 most of all, $4 most of a key, $5 most behind a row that was not held, $6
// microseconds until the next follow.
const releaseSQL = `
WITH due AS MATERIALIZED (
  SELECT o.id, o.seq, o.ordering_key, o.held FROM {outbox} o WHERE {waiting} AND o.due_at <= now() AND o.lane = ANY($1::smallint[]) ORDER BY o.due_at LIMIT $2),
head AS MATERIALIZED (SELECT o.* FROM due o WHERE (SELECT true FROM {outbox} p WHERE {before}) IS NULL),
most AS MATERIALIZED (SELECT greatest(1, least($4::int, $3::int / greatest(1, count(*)::int))) AS n FROM head),
behind AS MATERIALIZED (
  SELECT b.id, b.n > b.most AS late
  FROM (SELECT h.*, CASE WHEN h.held THEN m.n ELSE least(m.n, $5::int) END AS most FROM head h CROSS JOIN most m WHERE h.ordering_key <> '') h
    CROSS JOIN LATERAL (
      SELECT w.id, h.most, row_number() OVER (ORDER BY w.seq) AS n, bool_and(w.held OR w.due_at <= now()) OVER (ORDER BY w.seq) AS along
      FROM (SELECT o.id, o.seq, o.held, o.due_at FROM {outbox} o WHERE o.ordering_key = h.ordering_key AND o.seq > h.seq AND {waiting}
            ORDER BY o.seq LIMIT h.most + 1) w) b
  WHERE b.along),
back AS (
  UPDATE {outbox} u SET held = b.late, due_at = CASE WHEN b.late THEN now() + $6::bigint * interval '1 microsecond' END
  FROM (SELECT id, false AS late FROM head UNION ALL SELECT id, late FROM behind) b WHERE u.id = b.id
  RETURNING u.lane, u.seq),
low AS MATERIALIZED (SELECT lane, min(seq) AS seq FROM back GROUP BY lane)
UPDATE {lanes} l SET floor = least(l.floor, low.seq) FROM low WHERE l.lane = low.lane`

// alarm is when the first waiting row is due, as a claim has seen last.
type alarm struct {
	mu sync.Mutex
	at time.Time // zero: none waits
}

func (a *alarm) set(at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at = at
}

func (a *alarm) rings() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return !a.at.IsZero() && !time.Now().Before(a.at)
}

// release makes rows ready that are due, in a transaction of its own.
func (s *Store) release(ctx context.Context) error {
	return s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			return s.releaseIn(ctx, tx)
		})
	})
}

func (s *Store) releaseIn(ctx context.Context, tx pgx.Tx) error {
	var lanes []int16
	queue := &pgx.Batch{}
	queue.Queue(s.sql.setup)
	queue.Queue(s.sql.hurry)
	queue.Queue(s.sql.overdue, dueRows).Query(func(rows pgx.Rows) (err error) {
		lanes, err = pgx.CollectRows(rows, pgx.RowTo[int16])
		return err
	})
	if err := tx.SendBatch(ctx, queue).Close(); err != nil || len(lanes) == 0 {
		return err
	}
	queue = &pgx.Batch{}
	queue.Queue(s.sql.holdDue, lanes, dueRows)
	queue.Queue(s.sql.release, lanes, dueRows, releaseRows, keyRows, probeRows, followAfter.Microseconds())
	return tx.SendBatch(ctx, queue).Close()
}

// hold takes rows out of the way that a claim met behind a waiting one.
func (s *Store) hold(ctx context.Context, b driver.Batch, skip []string) error {
	lanes, tokens := columnsOfLeases(b.Leases)
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(s.sql.setup)
	queue.Queue(s.sql.hurry)
	queue.Queue(s.sql.lock, lanes, tokens)
	queue.Queue(s.sql.hold, tokens[0], holdRows, skip)
	queue.Queue(commitSQL)
	return s.send(ctx, queue)
}
