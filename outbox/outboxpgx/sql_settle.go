package outboxpgx

// lockSQL locks and returns the lanes whose token is still the lease's. $1 lanes, $2 tokens.
const lockSQL = `
SELECT l.lane FROM {lanes} l JOIN unnest($1::smallint[], $2::bigint[]) AS b(lane, token) ON l.lane = b.lane AND l.token = b.token
ORDER BY l.lane FOR UPDATE OF l`

// ours are the lanes that lockSQL has locked, for the statements after it. $1 lanes, $2 tokens.
const ours = `ANY(ARRAY(
  SELECT l.lane FROM {lanes} l JOIN unnest($1::smallint[], $2::bigint[]) AS b(lane, token) ON l.lane = b.lane AND l.token = b.token))`

// renewSQL extends leases. $3 microseconds.
const renewSQL = `UPDATE {lanes} SET lease_until = now() + $3 * interval '1 microsecond' WHERE lane = {ours}`

// deleteSQL deletes published messages. $3 ids.
const deleteSQL = `DELETE FROM {outbox} WHERE id = ANY($3::uuid[]) AND lane = {ours}`

// keepSQL marks published messages, which stay until they are pruned. $3 ids.
const keepSQL = `UPDATE {outbox} SET published_at = now() WHERE id = ANY($3::uuid[]) AND lane = {ours} AND published_at IS NULL`

// failSQL counts a failed attempt and lets the message wait. $3 ids, $4 microseconds, $5 classes, $6 errors.
const failSQL = `
UPDATE {outbox} o SET attempts = least(o.attempts, 2147483646) + 1, held = false, due_at = now() + f.delay * interval '1 microsecond', error_class = f.class, last_error = f.error
FROM unnest($3::uuid[], $4::bigint[], $5::text[], $6::text[]) AS f(id, delay, class, error)
WHERE o.id = f.id AND o.lane = {ours}`

// burySQL moves messages to the dead letters. A letter with the id may be there already, if the message was
// written again after it was given up: the newer one replaces it. $3 ids, $4 classes, $5 errors.
const burySQL = `
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

// closeSQL ends the leases: without its token a batch is settled once. It raises each floor to the first ready
// row, but not above the horizon, and not in another era than the horizon's. It ends the suspicion of a lane
// whose floor is past it, and a row of losses. $3 horizon, $4 era.
const closeSQL = `
UPDATE {lanes} l SET token = NULL, lease_until = now(), losses = 0,
  floor = CASE WHEN l.era = $4 THEN greatest(l.floor, least($3::bigint, f.seq)) ELSE l.floor END,
  suspect = CASE WHEN f.seq <= l.suspect THEN l.suspect END
FROM (SELECT h.lane, (SELECT o.seq FROM {outbox} o WHERE o.lane = h.lane AND o.seq >= h.floor AND {ready} ORDER BY o.seq LIMIT 1) AS seq
      FROM {lanes} h WHERE h.lane = {ours}) f
WHERE l.lane = f.lane`

// writersSQL returns the transactions that may yet insert a row whose number was passed already: see horizon.
// $1 table.
const writersSQL = `
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = $1::text::regclass AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid IS DISTINCT FROM pg_backend_pid()`
