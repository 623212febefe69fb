package outboxpgx

import "strings"

// statements are the SQL of the writer and of the relay, with the table names filled in.
type statements struct {
	insertOne, insert, insertJSON                     string
	remember, recall, forget                          string
	setup, hurry, free, lower                         string
	lease, read, due, alone, writers                  string
	overdue, holdDue, hold, release                   string
	lock, renew, published, kept, failed, dead, close string
}

func (t tables) statements() statements {
	parts := strings.NewReplacer("{ready}", ready, "{waiting}", waiting, "{before}", before, "{net}", net, "{ours}", ours,
		"{fits}", strings.ReplaceAll(fits, "{max}", "$4::bigint"), "{record}", recordColumns)
	twice := func(sql string) string { return t.fill(parts.Replace(sql)) } // a part may hold a name
	return statements{
		insertOne: twice(insertOneSQL), insert: twice(insertSQL), insertJSON: twice(insertJSONSQL),
		remember: twice(rememberSQL), recall: twice(recallSQL), forget: twice(forgetSQL),
		setup: setupSQL, hurry: hurrySQL, free: twice(freeSQL), lower: twice(lowerSQL),
		lease: twice(leaseSQL), read: twice(readSQL), due: twice(dueSQL), alone: twice(aloneSQL), writers: writersSQL,
		overdue: twice(overdueSQL), holdDue: twice(holdDueSQL), hold: twice(holdSQL), release: twice(releaseSQL),
		lock: twice(lockSQL), renew: twice(renewSQL), published: twice(publishedSQL), kept: twice(keptSQL), failed: twice(failedSQL),
		dead: twice(deadSQL), close: twice(closeSQL),
	}
}

// A transaction of a relay is one round trip. READ COMMITTED: a queue at SERIALIZABLE aborts itself,
// since the rows that SKIP LOCKED passes over are read all the same.
const (
	beginSQL  = `BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`
	commitSQL = `COMMIT`
)

// columns are those that every form of a message shares.
const columns = `id, lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers`

const insertOneSQL = `
INSERT INTO {outbox} ({columns}, due_at)
VALUES ($1, $2, $3, $4, $5, $6::text::jsonb, $7, $8, $9, $10, $11::text::jsonb, CASE WHEN $12::timestamptz > now() THEN $12::timestamptz END)`

// The order of seq is the order of the arguments, so that a key keeps it.
const insertSQL = `
INSERT INTO {outbox} ({columns}, due_at)
SELECT id, lane, name, body, content_type, headers::jsonb, ordering_key, transport_name, exchange, routing_key, route_headers::jsonb,
       CASE WHEN not_before > now() THEN not_before END
FROM unnest($1::uuid[], $2::smallint[], $3::text[], $4::bytea[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[], $11::text[],
            $12::timestamptz[])
     WITH ORDINALITY AS m(id, lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers, not_before, n)
ORDER BY n`

// One text argument, which every database/sql driver can pass.
const insertJSONSQL = `
INSERT INTO {outbox} ({columns}, due_at)
SELECT id, lane, name, decode(body, 'base64'), content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers,
       CASE WHEN not_before > now() THEN not_before END
FROM ROWS FROM (json_to_recordset($1::json) AS (id uuid, lane smallint, name text, body text, content_type text, headers jsonb,
       ordering_key text, transport_name text, exchange text, routing_key text, route_headers jsonb, not_before timestamptz))
     WITH ORDINALITY AS m(id, lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers, not_before, n)
ORDER BY n`

// An update takes over a key that has run out. $1 key, $2 id, $3 microseconds.
const rememberSQL = `
INSERT INTO {dedup} AS d (key, id, expires_at) VALUES ($1, $2, now() + $3 * interval '1 microsecond')
ON CONFLICT (key) DO UPDATE SET id = EXCLUDED.id, expires_at = EXCLUDED.expires_at WHERE d.expires_at <= now()`

const recallSQL = `SELECT id FROM {dedup} WHERE key = $1`

const forgetSQL = `
DELETE FROM {dedup} WHERE key = ANY(ARRAY(
  SELECT key FROM {dedup} WHERE expires_at <= now() ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))`

// The table is often empty when it is analysed and full a moment later: the plan must not follow
// the statistics, nor be made anew each time, which takes longer than the statement. And a relay whose
// host is gone must not keep its locks for as long as TCP does.
const setupSQL = `
SELECT set_config('idle_in_transaction_session_timeout', '5s', true), set_config('plan_cache_mode', 'force_generic_plan', true),
       set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true),
       set_config('enable_mergejoin', 'off', true), set_config('jit', 'off', true)`

// A claim does not wait for the disk. One that a crash of the database undoes is noticed when it is
// settled, since no other claim has its token; a settlement that did wait makes what the claim wrote
// as durable as itself.
const hurrySQL = `SELECT set_config('synchronous_commit', 'off', true)`

// A look below the floors takes no more than a twentieth of the time.
const briefSQL = `SELECT set_config('statement_timeout', '250ms', true)`

// The states of a row o that is not published.
const (
	ready   = `o.published_at IS NULL AND o.due_at IS NULL`
	waiting = `o.published_at IS NULL AND o.due_at IS NOT NULL`
)

// before finds the waiting row p that is nearest before o in its key: o must not be published. The
// nearest, since before the first may lie the entries of many that are gone. An empty key is none.
const before = `p.ordering_key = o.ordering_key AND o.ordering_key <> '' AND p.seq < o.seq AND p.published_at IS NULL AND p.due_at IS NOT NULL ORDER BY p.seq DESC LIMIT 1`

// Looks below the floors, where nothing should lie. What does shows that sequence numbers are not
// what they were: all lanes get a new era then.
const lowerSQL = `
WITH low AS MATERIALIZED (
  SELECT l.lane, (SELECT o.seq FROM {outbox} o WHERE o.lane = l.lane AND o.seq < l.floor AND {ready}
                  ORDER BY o.seq LIMIT 1) AS seq
  FROM {lanes} l),
locked AS MATERIALIZED (SELECT l.lane FROM {lanes} l WHERE EXISTS (SELECT FROM low WHERE seq IS NOT NULL) ORDER BY l.lane FOR UPDATE OF l)
UPDATE {lanes} l SET floor = least(l.floor, low.seq), era = (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
FROM locked JOIN low ON low.lane = locked.lane WHERE l.lane = locked.lane`

// The lanes least recently used come first, so that none is forgotten. A lane without a token is
// free whatever its time says: the clock may have been set back. A lane under suspicion, or whose last
// claim was lost, is leased only to who is alone, and by itself; a row without a lane says that there
// is one. A lost claim makes the batches of its lane eight times smaller, up to the last row that it
// can have held.
// $1 token, $2 microseconds, $3 lanes, $4 transports to skip, $5 limit, $6 alone.
const leaseSQL = `
WITH able AS MATERIALIZED (
  SELECT l.lane, l.lease_until, l.token IS NOT NULL OR l.suspect IS NOT NULL AS doubtful FROM {lanes} l
  WHERE (l.token IS NULL OR l.lease_until <= now())
    AND (SELECT true FROM {outbox} o WHERE o.lane = l.lane AND o.seq >= l.floor AND {ready}
           AND o.transport_name <> ALL($4::text[]) ORDER BY o.seq LIMIT 1)),
kind AS MATERIALIZED (SELECT doubtful FROM able WHERE $6::boolean OR NOT doubtful ORDER BY lease_until LIMIT 1),
free AS MATERIALIZED (
  SELECT l.lane FROM {lanes} l JOIN able a ON l.lane = a.lane
  WHERE (l.token IS NULL OR l.lease_until <= now()) AND a.doubtful = (SELECT doubtful FROM kind)
  ORDER BY a.lease_until LIMIT (SELECT CASE WHEN doubtful THEN 1 ELSE $3::int END FROM kind) FOR UPDATE OF l SKIP LOCKED),
leased AS (
  UPDATE {lanes} l SET token = $1::bigint, lease_until = now() + $2 * interval '1 microsecond',
    batch = CASE WHEN l.token IS NOT NULL THEN greatest(1, l.batch / 8) WHEN l.suspect IS NOT NULL THEN l.batch ELSE $5::int END,
    losses = CASE WHEN l.token IS NOT NULL AND l.batch = 1 THEN l.losses + 1 ELSE l.losses END,
    suspect = CASE WHEN l.token IS NULL THEN l.suspect ELSE (
      SELECT max(seq) FROM (SELECT o.seq FROM {outbox} o WHERE o.lane = l.lane AND o.seq >= l.floor AND {ready}
                              AND o.transport_name <> ALL($4::text[]) ORDER BY o.seq LIMIT l.batch) held) END
  FROM free WHERE l.lane = free.lane
  RETURNING l.lane, l.suspect IS NOT NULL AND l.batch = 1 AS single, l.era)
SELECT lane, single, (SELECT doubtful FROM kind), era FROM leased
UNION ALL SELECT NULL, false, true, 0 FROM able WHERE doubtful AND NOT $6::boolean`

// The rows of the lanes just leased, each lane's share of the limit, cut where the bodies exceed
// the bytes; without their contents those that are behind another of their key, or too large by
// themselves. It is a statement of its own: its snapshot must be newer than the lock on the lane.
// $1 token, $2 limit, $3 transports to skip, $4 bytes.
const readSQL = `
SELECT {record}, seq, behind
FROM (
  SELECT m.*, fits AND NOT behind AS texts, fits AND NOT behind AS whole,
    sum(octet_length(m.body)) FILTER (WHERE fits AND NOT behind) OVER (ORDER BY m.seq) - octet_length(m.body) AS bytes_before
  FROM {lanes} l CROSS JOIN LATERAL (
    SELECT o.*, (SELECT true FROM {outbox} p WHERE {before}) IS NOT NULL AS behind, {fits} AS fits FROM {outbox} o
    WHERE o.lane = l.lane AND o.seq >= l.floor AND {ready} AND o.transport_name <> ALL($3::text[])
    ORDER BY o.seq LIMIT greatest(1, least(l.batch, $2::int / (SELECT count(*)::int FROM {lanes} WHERE token = $1)))) m
  WHERE l.token = $1) q
WHERE NOT whole OR bytes_before < $4::bigint
ORDER BY seq
LIMIT $2::int`

// Counts the losses of the one message that is claimed by itself. $1 token, $2 its seq.
const aloneSQL = `
UPDATE {lanes} SET losses = CASE WHEN alone = $2::bigint THEN losses ELSE 0 END, alone = $2::bigint WHERE token = $1 RETURNING losses`

// Gives back the lanes of claims whose COMMIT may have been lost on its way. $1 tokens.
const freeSQL = `
WITH mine AS MATERIALIZED (SELECT lane FROM {lanes} WHERE token = ANY($1::bigint[]) ORDER BY lane FOR UPDATE SKIP LOCKED)
UPDATE {lanes} l SET token = NULL FROM mine WHERE l.lane = mine.lane`

// The microseconds until the first waiting row is due, a year at most, since it may be infinite.
const dueSQL = `
SELECT CASE WHEN due_at > now() THEN ceil(extract(epoch FROM least(due_at, now() + interval '1 year') - now()) * 1000000)::bigint ELSE 0 END
FROM {outbox} o WHERE {waiting} ORDER BY due_at LIMIT 1`

// The transactions that may yet insert a row with a number already passed: see horizon.
const writersSQL = `
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = $1::text::regclass AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid IS DISTINCT FROM pg_backend_pid()`

// Locks the lanes whose token is still ours. $1 lanes, $2 tokens.
const lockSQL = `
SELECT l.lane FROM {lanes} l JOIN unnest($1::smallint[], $2::bigint[]) AS b(lane, token) ON l.lane = b.lane AND l.token = b.token
ORDER BY l.lane FOR UPDATE OF l`

// ours are the lanes that lock has locked, in the statements after it. $1 lanes, $2 tokens.
const ours = `ANY(ARRAY(
  SELECT l.lane FROM {lanes} l JOIN unnest($1::smallint[], $2::bigint[]) AS b(lane, token) ON l.lane = b.lane AND l.token = b.token))`

// $3 microseconds.
const renewSQL = `UPDATE {lanes} SET lease_until = now() + $3 * interval '1 microsecond' WHERE lane = {ours}`

// $3 ids.
const publishedSQL = `DELETE FROM {outbox} WHERE id = ANY($3::uuid[]) AND lane = {ours}`

const keptSQL = `UPDATE {outbox} SET published_at = now() WHERE id = ANY($3::uuid[]) AND lane = {ours} AND published_at IS NULL`

// $3 ids, $4 microseconds, $5 classes, $6 errors.
const failedSQL = `
UPDATE {outbox} o SET attempts = least(o.attempts, 2147483646) + 1, held = false, due_at = now() + f.delay * interval '1 microsecond', error_class = f.class, last_error = f.error
FROM unnest($3::uuid[], $4::bigint[], $5::text[], $6::text[]) AS f(id, delay, class, error)
WHERE o.id = f.id AND o.lane = {ours}`

// An id may be there already, if it was written again after it died: the newer message replaces the
// older.
// $3 ids, $4 classes, $5 errors.
const deadSQL = `
WITH gone AS (DELETE FROM {outbox} WHERE id = ANY($3::uuid[]) AND lane = {ours} RETURNING *)
INSERT INTO {dead} ({columns}, seq, created_at, attempts, error_class, last_error)
SELECT g.id, g.lane, g.name, g.body, g.content_type, g.headers, g.ordering_key, g.transport_name, g.exchange, g.routing_key, g.route_headers,
       g.seq, g.created_at, least(g.attempts, 2147483646) + 1, f.class, f.error
FROM gone g JOIN unnest($3::uuid[], $4::text[], $5::text[]) AS f(id, class, error) ON f.id = g.id
ORDER BY g.seq
ON CONFLICT (id) DO UPDATE SET (
  lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers,
  seq, created_at, attempts, error_class, last_error, died_at) = (
  EXCLUDED.lane, EXCLUDED.name, EXCLUDED.body, EXCLUDED.content_type, EXCLUDED.headers, EXCLUDED.ordering_key, EXCLUDED.transport_name,
  EXCLUDED.exchange, EXCLUDED.routing_key, EXCLUDED.route_headers, EXCLUDED.seq, EXCLUDED.created_at, EXCLUDED.attempts, EXCLUDED.error_class, EXCLUDED.last_error, EXCLUDED.died_at)`

// The token goes, so that a batch is settled once; the floor rises to the first ready row, up to the
// horizon of this era; the losses in a row are over; and the suspicion ends when the floor is past it.
// $3 horizon, $4 era.
const closeSQL = `
UPDATE {lanes} l SET token = NULL, lease_until = now(), losses = 0,
  floor = CASE WHEN l.era = $4 THEN greatest(l.floor, least($3::bigint, f.seq)) ELSE l.floor END,
  suspect = CASE WHEN f.seq <= l.suspect THEN l.suspect END
FROM (SELECT h.lane, (SELECT o.seq FROM {outbox} o WHERE o.lane = h.lane AND o.seq >= h.floor AND {ready} ORDER BY o.seq LIMIT 1) AS seq
      FROM {lanes} h WHERE h.lane = {ours}) f
WHERE l.lane = f.lane`
