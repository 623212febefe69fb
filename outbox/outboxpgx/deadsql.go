package outboxpgx

import "strings"

// deadStatements are the SQL of lists for operators, with the table names filled in.
type deadStatements struct {
	list, count, groups, selected, returnable, replay, remove, audit string

	waitingReady, waitingParked string
}

func (t tables) deadStatements() deadStatements {
	parts := strings.NewReplacer("{where}", deadWhere, "{match}", deadMatch, "{again}", deadAgain,
		"{replayNoted}", strings.ReplaceAll(deadNoted, "{action}", "CASE WHEN $16::bytea[] IS NULL THEN 'replay' ELSE 'edit' END"),
		"{removeNoted}", strings.ReplaceAll(deadNoted, "{action}", "'remove'"),
		"{fits}", strings.ReplaceAll(fits, "{max}", "$10::bigint"),
		"{record}", recordColumns)
	fill := func(sql string) string { return t.fill(parts.Replace(parts.Replace(sql))) }
	waiting := func(rows string) string {
		sql := strings.ReplaceAll(waitingListSQL, "{waitingRows}", rows)
		return t.fill(strings.NewReplacer("{fits}", strings.ReplaceAll(fits, "{max}", "$4::bigint"), "{record}", recordColumns).Replace(sql))
	}
	return deadStatements{
		waitingReady: waiting(waitingReadySQL), waitingParked: waiting(waitingParkedSQL),
		list: fill(deadListSQL), count: fill(deadCountSQL), groups: fill(deadGroupsSQL),
		selected: fill(deadSelectedSQL), returnable: fill(deadReturnableSQL), replay: fill(deadReplaySQL), remove: fill(deadRemoveSQL), audit: fill(auditSQL),
	}
}

// deadWhere is the filter of dead letters: an argument that is null does not filter. $1 ids, $2 class,
// $3 name, $4 key, $5 and $6 the times between which they failed, $7 limit, $8 a part of the error, $9 fingerprint.
const deadWhere = deadMatch + `
ORDER BY died_at, seq LIMIT $7`

const deadMatch = `
  ($1::uuid[] IS NULL OR id = ANY($1)) AND ($2::text IS NULL OR error_class = $2) AND ($3::text IS NULL OR name = $3)
  AND ($4::text IS NULL OR ordering_key = $4) AND ($5::timestamptz IS NULL OR died_at >= $5) AND ($6::timestamptz IS NULL OR died_at < $6)
  AND ($8::text IS NULL OR position($8 IN last_error) > 0) AND ($9::text IS NULL OR fingerprint = $9)`

// $10 bytes of all bodies, $11 and $12 where the list begins.
const deadListSQL = `
SELECT {record}, left(error_class, 100), left(last_error, 1000), died_at, fingerprint, seq
FROM (SELECT d.*, fits AS texts, fits AND sum(octet_length(body)) FILTER (WHERE fits) OVER (ORDER BY died_at, seq) <= $10 AS whole
      FROM (SELECT o.*, {fits} AS fits FROM {dead} o WHERE (died_at, seq) > ($11::timestamptz, $12::bigint) AND {where}) d) d
ORDER BY died_at, seq`

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

// deadPlansSQL has letters found by index: the tables are often empty when they are analysed, and hold very many a moment
// later. The filter has arguments that are null, so that one plan is not for all; Postgres would keep one that was made while
// there was nothing, and read the whole table for every page. Nor do the statements join tables: a plan
// for few rows compares all with all.
const deadPlansSQL = `
SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)`

const beginReadSQL = `BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY`

// What becomes of letters d that are to be tried again: outlived stay because they were stored more than
// $10 microseconds ago, unless $11 forces them; again, because the outbox holds their id; the others go.
const deadReturnableSQL = `
WITH outlived AS MATERIALIZED (SELECT FROM {dead} d WHERE NOT $11::boolean AND created_at < now() - $10::bigint * interval '1 microsecond' AND {where}),
     again AS MATERIALIZED (SELECT FROM {dead} d WHERE ($11 OR created_at >= now() - $10 * interval '1 microsecond') AND {again} AND {where}),
     others AS MATERIALIZED (SELECT id, seq FROM {dead} d WHERE ($11 OR created_at >= now() - $10 * interval '1 microsecond') AND NOT ({again}) AND {where})
SELECT (SELECT coalesce(array_agg(id ORDER BY seq), '{}') FROM others), (SELECT count(*) FROM outlived), (SELECT count(*) FROM again)`

// deadAgain looks for each letter alone, as an EXISTS may not.
const deadAgain = `(SELECT true FROM {outbox} o WHERE o.id = d.id LIMIT 1) IS NOT NULL`

const deadSelectedSQL = `SELECT coalesce(array_agg(id ORDER BY died_at, seq), '{}') FROM (SELECT id, died_at, seq FROM {dead} WHERE {where}) d`

// deadNoted keeps who has changed so many, where there are any: once for a change of many steps. $10 the
// note of the steps before, $11 who, $12 why, $13 the filter.
const deadNoted = `
     counted AS (UPDATE {audit} a SET count = a.count + n FROM changed WHERE a.id = $10::bigint RETURNING a.id),
     noted AS (
       INSERT INTO {audit} (actor, reason, action, count, filter)
       SELECT $11::text, $12::text, {action}, n, $13::text::jsonb FROM changed WHERE n > 0 AND NOT EXISTS (SELECT FROM counted) RETURNING id),
     note AS (SELECT coalesce((SELECT id FROM counted), (SELECT id FROM noted), 0))`

// A change that a table ignores fails: a letter that left its table and did not arrive in the outbox would be lost.
//
// Locked in one order before they are deleted, so that two at once do not return one letter twice; the second waits, so
// that it brings nothing back before what the first does. $14 microseconds between two, $15 how many were
// returned before, $16 the bodies of $1 where they are edited.
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
