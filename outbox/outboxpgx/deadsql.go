package outboxpgx

import "strings"

// deadStatements are the SQL of lists for operators, with the table names filled in.
type deadStatements struct {
	list, count, chosen, groups, trial, replay, remove, audit string

	waitingReady, waitingParked string
}

func (t tables) deadStatements() deadStatements {
	parts := strings.NewReplacer("{where}", deadWhere, "{replayed}", deadReplayed, "{fits}", strings.ReplaceAll(fits, "{max}", "$10::bigint"),
		"{record}", recordColumns)
	fill := func(sql string) string { return t.fill(parts.Replace(parts.Replace(sql))) }
	waiting := func(rows string) string {
		sql := strings.ReplaceAll(waitingListSQL, "{waitingRows}", rows)
		return t.fill(strings.NewReplacer("{fits}", strings.ReplaceAll(fits, "{max}", "$4::bigint"), "{record}", recordColumns).Replace(sql))
	}
	return deadStatements{
		waitingReady: waiting(waitingReadySQL), waitingParked: waiting(waitingParkedSQL),
		list: fill(deadListSQL), count: fill(deadCountSQL), chosen: fill(deadChosenSQL), groups: fill(deadGroupsSQL),
		trial: fill(deadTrialSQL), replay: fill(deadReplaySQL), remove: fill(deadRemoveSQL), audit: fill(auditSQL),
	}
}

// deadWhere is the filter of dead letters: an argument that is null does not filter. $1 ids, $2 class,
// $3 name, $4 key, $5 and $6 the times between which they failed, $7 limit, $8 a part of the error, $9 fingerprint.
const deadWhere = `
  ($1::uuid[] IS NULL OR id = ANY($1)) AND ($2::text IS NULL OR error_class = $2) AND ($3::text IS NULL OR name = $3)
  AND ($4::text IS NULL OR ordering_key = $4) AND ($5::timestamptz IS NULL OR died_at >= $5) AND ($6::timestamptz IS NULL OR died_at < $6)
  AND ($8::text IS NULL OR position($8 IN last_error) > 0) AND ($9::text IS NULL OR fingerprint = $9)
ORDER BY died_at, seq LIMIT $7`

// $10 bytes of all bodies.
const deadListSQL = `
SELECT {record}, left(error_class, 100), left(last_error, 1000), died_at, fingerprint
FROM (SELECT d.*, fits AS texts, fits AND sum(octet_length(body)) FILTER (WHERE fits) OVER (ORDER BY died_at, seq) <= $10 AS whole
      FROM (SELECT o.*, {fits} AS fits FROM {dead} o WHERE {where}) d) d
ORDER BY died_at, seq`

const deadChosenSQL = `WITH {replayed}) SELECT id FROM chosen`

const deadCountSQL = `SELECT count(*) FROM (SELECT FROM {dead} WHERE {where}) d`

// $10 groups. The sample is the latest of its kind. Times that another program has made infinite do not count.
const deadGroupsSQL = `
WITH chosen AS MATERIALIZED (SELECT id, seq, died_at, fingerprint FROM {dead} WHERE {where}),
     kinds AS (
       SELECT fingerprint, count(*) AS n, min(died_at) FILTER (WHERE isfinite(died_at)) AS first, max(died_at) FILTER (WHERE isfinite(died_at)) AS last FROM chosen
       GROUP BY fingerprint ORDER BY n DESC, fingerprint LIMIT $10),
     latest AS (SELECT DISTINCT ON (fingerprint) fingerprint, id FROM chosen ORDER BY fingerprint, isfinite(died_at) DESC, died_at DESC, seq DESC)
SELECT k.n, k.first, k.last, d.id, left(d.name, 128), left(d.ordering_key, 1000), left(d.transport_name, 128), d.created_at, d.attempts,
  left(d.error_class, 100), left(d.last_error, 1000), d.died_at, d.fingerprint
FROM kinds k JOIN latest USING (fingerprint) JOIN {dead} d ON d.id = latest.id
ORDER BY k.n DESC, k.fingerprint`

// deadReplayed are what becomes of the letters d: outlived stay because they were stored more than $10
// microseconds ago, unless $11 forces them; again, because the outbox holds their id; the others go.
const deadReplayed = `
     outlived AS MATERIALIZED (SELECT FROM {dead} d WHERE NOT $11::boolean AND created_at < now() - $10::bigint * interval '1 microsecond' AND {where}),
     again AS MATERIALIZED (
       SELECT FROM {dead} d WHERE ($11 OR created_at >= now() - $10 * interval '1 microsecond')
         AND EXISTS (SELECT FROM {outbox} o WHERE o.id = d.id) AND {where}),
     chosen AS MATERIALIZED (
       SELECT id FROM {dead} d WHERE ($11 OR created_at >= now() - $10 * interval '1 microsecond')
         AND NOT EXISTS (SELECT FROM {outbox} o WHERE o.id = d.id) AND {where}`

const deadTrialSQL = `
WITH {replayed})
SELECT (SELECT count(*) FROM chosen), (SELECT count(*) FROM outlived), (SELECT count(*) FROM again)`

// Locked before they are deleted, so that two at once do not return one letter twice. Who did it is
// noted only if something was changed, once for a replay of many steps. $12 microseconds between two, $13 how many were
// returned before, $14 and $15 the bodies of those that were edited, $16 the note of the steps before, $17 who, $18 why,
// $19 the filter.
const deadReplaySQL = `
WITH {replayed} FOR UPDATE OF d SKIP LOCKED),
     gone AS (DELETE FROM {dead} d USING chosen c WHERE d.id = c.id RETURNING d.*),
     back AS (
       INSERT INTO {outbox} ({columns}, created_at, due_at)
       SELECT id, lane, name, coalesce(edited_body, body), content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers,
              created_at, CASE WHEN $12::bigint > 0 THEN now() + ($13::bigint + row_number() OVER (ORDER BY seq) - 1) * $12::bigint * interval '1 microsecond' END
       FROM gone LEFT JOIN unnest($14::uuid[], $15::bytea[]) AS edited (edited_id, edited_body) ON edited_id = id
       ORDER BY seq RETURNING 1),
     changed AS (SELECT count(*) AS n FROM back),
     counted AS (UPDATE {audit} a SET count = a.count + n FROM changed WHERE a.id = $16::bigint RETURNING a.id),
     noted AS (
       INSERT INTO {audit} (actor, reason, action, count, filter)
       SELECT $17::text, $18::text, CASE WHEN $14::uuid[] IS NULL THEN 'replay' ELSE 'edit' END, n, $19::text::jsonb FROM changed
       WHERE n > 0 AND NOT EXISTS (SELECT FROM counted) RETURNING id)
SELECT n, (SELECT count(*) FROM outlived), (SELECT count(*) FROM again), coalesce((SELECT id FROM counted), (SELECT id FROM noted), 0) FROM changed`

// $10 who, $11 why, $12 the filter.
const deadRemoveSQL = `
WITH chosen AS MATERIALIZED (SELECT id FROM {dead} WHERE {where} FOR UPDATE SKIP LOCKED),
     gone AS (DELETE FROM {dead} d USING chosen c WHERE d.id = c.id RETURNING 1),
     changed AS (SELECT count(*) AS n FROM gone),
     noted AS (
       INSERT INTO {audit} (actor, reason, action, count, filter)
       SELECT $10::text, $11::text, 'remove', n, $12::text::jsonb FROM changed WHERE n > 0)
SELECT n FROM changed`

const auditSQL = `SELECT at, actor, reason, action, count, filter FROM {audit} ORDER BY id DESC LIMIT $1`
