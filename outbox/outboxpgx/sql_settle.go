package outboxpgx

// settleSQL settles a batch, and returns the lanes that it still had and what could not be recorded; lookSQL says whether a row
// of these is ready: see migrations/0006_outbox_relay.sql. $1 lanes, $2 tokens, $3 published ids, $4 whether they are kept, $5 failed ids, $6
// microseconds, $7 classes, $8 errors, $9 dead ids, $10 classes, $11 errors, $12 horizon, $13 its era, $14 whether outcomes
// are recorded one by one.
const (
	settleSQL = `
SELECT ours, marked, refused, reasons, dropped
FROM {settle}($1::smallint[], $2::bigint[], $3::uuid[], $4::boolean, $5::uuid[], $6::bigint[], $7::text[], $8::text[],
  $9::uuid[], $10::text[], $11::text[], $12::bigint, $13::bigint, $14::boolean)`
	lookSQL = `SELECT {look}($1::smallint[])`
)

// stillReadySQL returns those messages that are ready. $1 ids.
const stillReadySQL = `SELECT o.id FROM {outbox} o WHERE o.id = ANY($1::uuid[]) AND {ready}`

// lockedSQL returns those messages that another session has locked. $1 ids.
const lockedSQL = `SELECT o.id FROM {outbox} o WHERE o.id = ANY($1::uuid[]) AND ({free}) IS NULL`

// lockSQL locks and returns the lanes whose token is still the lease's. $1 lanes, $2 tokens.
const lockSQL = `
SELECT l.lane FROM {lanes} l JOIN unnest($1::smallint[], $2::bigint[]) AS b(lane, token) ON l.lane = b.lane AND l.token = b.token
ORDER BY l.lane FOR UPDATE OF l`

// renewSQL extends the leases that lockSQL has locked. $1 lanes, $2 tokens, $3 microseconds.
const renewSQL = `
UPDATE {lanes} l SET lease_until = now() + $3 * interval '1 microsecond'
FROM unnest($1::smallint[], $2::bigint[]) AS b(lane, token) WHERE l.lane = b.lane AND l.token = b.token`

// writersSQL returns the transactions that may yet insert a row whose number was passed already: see horizon.
// $1 table.
const writersSQL = `
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = $1::text::regclass AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid IS DISTINCT FROM pg_backend_pid()`
