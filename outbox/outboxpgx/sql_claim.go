package outboxpgx

// claimSQL leases lanes: see migrations/0006_outbox_relay.sql. $1 token, $2 microseconds of the lease, $3 lanes, $4
// transports to skip, $5 limit, $6 whether the relay has no other batch in hand, $7 tokens of lost claims.
const claimSQL = `
SELECT lane, single, doubtful, era, due_us, ends_us, dropped
FROM {claim}($1::bigint, $2::bigint, $3::integer, $4::text[], $5::integer, $6::boolean, $7::bigint[])`

// readSQL reads the rows of the lanes just leased: of each lane its share of the limit, in order, until the
// bodies exceed the bytes. Rows behind a waiting one of their key, those that another session has locked, and rows too large
// by themselves come without a body. It follows claimSQL, under its settings: its snapshot must be newer than the lock on the
// lane. $1 token, $2 limit, $3 transports to skip, $4 bytes.
const readSQL = `
SELECT {record}, seq, behind, locked
FROM (
  SELECT m.*, fits AS texts, fits AND NOT behind AND NOT locked AS whole,
    sum(octet_length(m.body)) FILTER (WHERE fits AND NOT behind AND NOT locked) OVER (ORDER BY m.seq) - octet_length(m.body) AS bytes_before
  FROM {lanes} l CROSS JOIN LATERAL ({rows}) m
  WHERE l.token = $1) q
WHERE NOT whole OR bytes_before < $4::bigint
ORDER BY seq
LIMIT $2::int`

// rowsSQL are the rows of a lane l. Each is looked at back to the nearest waiting row of its key.
//
// runsSQL are the same for less where very many rows of a key were released under an old snapshot: their index entries are
// walked over for each row of it. Of a run of rows of one key each is looked at only back to the one before it (previous). So
// a row behind one that is behind may not be said to be; that one's key is told, as it fits. It costs a claim a third more, so
// it is for those that are slow.
const (
	rowsSQL = `
    SELECT o.*, (SELECT true FROM {outbox} p WHERE {before}) IS NOT NULL AS behind, ({free}) IS NULL AS locked, {fits} AS fits FROM {share}`
	runsSQL = `
    SELECT o.*, (SELECT true FROM {outbox} p WHERE p.seq > coalesce(o.previous, 0) AND {before}) IS NOT NULL AS behind
    FROM (SELECT r.*, CASE WHEN lag(r.ordering_key) OVER w = r.ordering_key AND lag(r.fits) OVER w THEN lag(r.seq) OVER w END AS previous
      FROM (SELECT o.*, ({free}) IS NULL AS locked, {fits} AS fits FROM {share}) r
      WINDOW w AS (ORDER BY r.seq)) o`
	shareSQL = `{outbox} o
    WHERE o.lane = l.lane AND o.seq >= l.floor AND {ready} AND o.transport_name <> ALL($3::text[])
    ORDER BY o.seq LIMIT greatest(1, least(l.batch, $2::int / (SELECT count(*)::int FROM {lanes} WHERE token = $1)))`
)

// countLossesSQL returns how many claims in a row, of exactly this message alone, were lost. $1 token, $2 seq
// of the message.
const countLossesSQL = `
UPDATE {lanes} SET losses = CASE WHEN alone = $2::bigint THEN losses ELSE 0 END, alone = $2::bigint WHERE token = $1 RETURNING losses`

// lowerSQL lowers the floors to ready rows that lie below them. None should. One that does shows that
// sequence numbers have begun anew, so all lanes get a new era. No floor is believed any more: what a lane gets next may lie
// below its floor, and what it gets later above.
const lowerSQL = `
WITH low AS MATERIALIZED (
  SELECT l.lane, (SELECT o.seq FROM {outbox} o WHERE o.lane = l.lane AND o.seq < l.floor AND {ready}
                  ORDER BY o.seq LIMIT 1) AS seq
  FROM {lanes} l),
locked AS MATERIALIZED (SELECT l.lane FROM {lanes} l WHERE EXISTS (SELECT FROM low WHERE seq IS NOT NULL) ORDER BY l.lane FOR UPDATE OF l),
lowered AS (
  UPDATE {lanes} l SET floor = least(l.floor, coalesce(low.seq, 0)), era = (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
  FROM locked JOIN low ON low.lane = locked.lane WHERE l.lane = locked.lane RETURNING 1)
SELECT CASE WHEN locked > lowered THEN {ignored}({lanesName}, locked - lowered) END
FROM (SELECT (SELECT count(*) FROM locked) AS locked, (SELECT count(*) FROM lowered) AS lowered) n`
