package outboxpgx

// leaseSQL leases lanes that nobody holds and that have something ready, those first that were leased
// longest ago. A lane without a token is free whatever its lease_until says: the clock may have been set
// back. A pause leaves all lanes alone.
//
// A lane is doubtful when its last claim was lost, or when messages of that claim are still under
// suspicion. Doubtful lanes are leased singly, to a relay that has no other batch in hand. To other relays
// a row with a NULL lane signals that there is one. Each lost claim makes the batches of its lane eight
// times smaller, until the last row that the claim can have held is settled.
//
// $1 token, $2 microseconds of the lease, $3 lanes, $4 transports to skip, $5 limit, $6 whether the relay
// is alone.
const leaseSQL = `
WITH able AS MATERIALIZED (
  SELECT l.lane, l.lease_until, l.token IS NOT NULL OR l.suspect IS NOT NULL AS doubtful FROM {lanes} l
  WHERE (l.token IS NULL OR l.lease_until <= now()) AND NOT EXISTS (SELECT FROM {pause})
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

// readSQL reads the rows of the lanes just leased: of each lane its share of the limit, in order, until the
// bodies exceed the bytes. Rows behind a waiting one of their key, and rows too large by themselves, come
// without contents. It is a statement of its own because its snapshot must be newer than the lock on the
// lane. $1 token, $2 limit, $3 transports to skip, $4 bytes.
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

// countLossesSQL returns how many claims in a row, of exactly this message alone, were lost. $1 token, $2 seq
// of the message.
const countLossesSQL = `
UPDATE {lanes} SET losses = CASE WHEN alone = $2::bigint THEN losses ELSE 0 END, alone = $2::bigint WHERE token = $1 RETURNING losses`

// giveBackSQL ends the leases of claims whose COMMIT may have been lost on its way. $1 tokens.
const giveBackSQL = `
WITH mine AS MATERIALIZED (SELECT lane FROM {lanes} WHERE token = ANY($1::bigint[]) ORDER BY lane FOR UPDATE SKIP LOCKED)
UPDATE {lanes} l SET token = NULL FROM mine WHERE l.lane = mine.lane`

// firstDueSQL returns the microseconds until the first waiting row is due: at most a year, since due_at may be
// infinite. No row: none waits.
const firstDueSQL = `
SELECT CASE WHEN due_at > now() THEN ceil(extract(epoch FROM least(due_at, now() + interval '1 year') - now()) * 1000000)::bigint ELSE 0 END
FROM {outbox} o WHERE {waiting} ORDER BY due_at LIMIT 1`

// lowerSQL lowers the floors to ready rows that lie below them. None should. One that does shows that
// sequence numbers have begun anew, so all lanes get a new era.
const lowerSQL = `
WITH low AS MATERIALIZED (
  SELECT l.lane, (SELECT o.seq FROM {outbox} o WHERE o.lane = l.lane AND o.seq < l.floor AND {ready}
                  ORDER BY o.seq LIMIT 1) AS seq
  FROM {lanes} l),
locked AS MATERIALIZED (SELECT l.lane FROM {lanes} l WHERE EXISTS (SELECT FROM low WHERE seq IS NOT NULL) ORDER BY l.lane FOR UPDATE OF l)
UPDATE {lanes} l SET floor = least(l.floor, low.seq), era = (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
FROM locked JOIN low ON low.lane = locked.lane WHERE l.lane = locked.lane`
