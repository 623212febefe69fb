package outboxpgx

// heldUntil is the due time of a row that is held behind a row p. It is a safety net, some time after p is due:
// normally the release of p brings the row along.
const heldUntil = `CASE WHEN p.held AND p.due_at > now() + interval '30 minutes' THEN p.due_at
  ELSE least(greatest(p.due_at, now()), now() + interval '1 year') + interval '1 hour' END`

// dueRowsSQL are the rows that a release looks at: those that are due and free, without some, or of some alone. See refusedDue.
const dueRowsSQL = `{waiting} AND o.due_at <= now() AND o.id <> ALL({skip}::uuid[]) AND ({only}::uuid[] IS NULL OR o.id = ANY({only}::uuid[])) AND {free}`

// lockDueSQL locks and returns the lanes of rows that are due, without those that are busy. $1 limit of rows, $2 ids to skip,
// $3 the only ids, or NULL.
const lockDueSQL = `
WITH due AS MATERIALIZED (SELECT o.lane FROM {outbox} o WHERE {dueRows} ORDER BY o.due_at LIMIT $1)
SELECT l.lane FROM {lanes} l WHERE l.lane IN (SELECT lane FROM due) ORDER BY l.lane FOR UPDATE OF l SKIP LOCKED`

// heldSQL holds the rows that behind has, and fails where the table ignores all of that.
const heldSQL = `held AS (
  UPDATE {outbox} u SET held = true, due_at = {heldUntil} FROM behind p WHERE u.id = ANY (ARRAY[p.id]) AND p.found > 0 RETURNING 1)
SELECT CASE WHEN EXISTS (SELECT FROM behind) AND NOT EXISTS (SELECT FROM held) THEN {ignored}({outboxName}, (SELECT count(*) FROM behind)) END`

// dueSQL returns rows that are due. $1 limit, $2 ids to skip, $3 as above.
const dueSQL = `SELECT o.id FROM {outbox} o WHERE {dueRows} ORDER BY o.due_at LIMIT $1`

// holdDueSQL holds the rows that are due behind a waiting row of their key. $1 lanes, $2 limit of rows, $3 ids to skip, $4 the
// only ids, or NULL.
//
// The count reads its whole input before it returns a row, so all looks precede the first write. Otherwise each look walks
// over what the statement has written: 1,000 rows of a key take three times as long. MATERIALIZED does not do: it is read row
// by row.
//
// "= ANY (ARRAY[p.id])" is "= p.id" for a planner that cannot merge by it. With "=" it reads the whole table for each of a
// handful of rows where it takes the table for empty, as it was when it was last analysed.
const holdDueSQL = `
WITH due AS MATERIALIZED (
  SELECT o.id, o.seq, o.ordering_key FROM {outbox} o WHERE o.lane = ANY($1::smallint[]) AND {dueRows} ORDER BY o.due_at LIMIT $2),
behind AS MATERIALIZED (
  SELECT o.id, p.due_at, p.held, count(*) OVER () AS found
  FROM due o CROSS JOIN LATERAL (SELECT p.due_at, p.held FROM {outbox} p WHERE {before}) p),
{held}`

// holdReadySQL holds the ready rows that are behind a waiting row of their key. $1 token, $2 limit of rows of a
// lane, $3 transports to skip.
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

// releaseSQL releases two kinds of rows: those that are due and the first of their key (head), and those held
// behind them, up to the next row that waits on its own account (behind). Where too many are behind, the
// first that is too many gets a due time of its own, so that it follows later. So does the head where another session has
// locked a row behind it (stuck): that row could be given none. The floor of a lane is lowered to the rows that come back.
//
// $1 lanes, $2 limit of rows that are due, $3 limit of all rows behind, $4 limit of a key, $5 limit behind a
// row that was not held, $6 microseconds until the rest follows, $7 ids to skip, $8 the only ids, or NULL. It fails where the table
// ignores a part of that.
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
