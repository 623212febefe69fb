package outboxpgx

import "strings"

// deadStatements are the SQL of DeadLetters, with the table names filled in.
type deadStatements struct {
	list, count, retry, remove, audit string
}

func (t tables) deadStatements() deadStatements {
	parts := strings.NewReplacer("{where}", deadWhere, "{fits}", strings.ReplaceAll(fits, "{max}", "$8::bigint"),
		"{record}", recordColumns)
	fill := func(sql string) string { return t.fill(parts.Replace(sql)) }
	return deadStatements{
		list: fill(deadListSQL), count: fill(deadCountSQL),
		retry: fill(deadRetrySQL), remove: fill(deadRemoveSQL), audit: fill(auditSQL),
	}
}

// deadWhere is the filter of dead letters: an argument that is null does not filter.
const deadWhere = `
  ($1::uuid[] IS NULL OR id = ANY($1)) AND ($2::text IS NULL OR error_class = $2) AND ($3::text IS NULL OR name = $3)
  AND ($4::text IS NULL OR ordering_key = $4) AND ($5::bigint IS NULL OR died_at <= now() - $5 * interval '1 microsecond')
  AND ($7::text IS NULL OR position($7 IN last_error) > 0)
ORDER BY died_at, seq LIMIT $6`

// $8 bytes of all bodies.
const deadListSQL = `
SELECT {record}, left(error_class, 100), left(last_error, 1000), died_at
FROM (SELECT d.*, fits AS texts, fits AND sum(octet_length(body)) FILTER (WHERE fits) OVER (ORDER BY died_at, seq) <= $8 AS whole
      FROM (SELECT o.*, {fits} AS fits FROM {dead} o WHERE {where}) d) d
ORDER BY died_at, seq`

const deadCountSQL = `SELECT count(*) FROM (SELECT FROM {dead} WHERE {where}) d`

// Locked before they are deleted, so that two at once do not retry one letter twice. Who did it is
// noted only if something was changed.
// $8 who, $9 why, $10 the filter, $11 microseconds to spread them over, $12 whether they go elsewhere,
// $13 transport, $14 exchange, $15 routing key, $16 route headers, $17 microseconds, $18 also those stored
// longer ago than that.
const deadRetrySQL = `
WITH chosen AS MATERIALIZED (
       SELECT id FROM {dead} d WHERE NOT EXISTS (SELECT FROM {outbox} o WHERE o.id = d.id)
         AND ($18::boolean OR created_at >= now() - $17::bigint * interval '1 microsecond') AND {where} FOR UPDATE OF d SKIP LOCKED),
     outlived AS MATERIALIZED (
       SELECT FROM {dead} d WHERE NOT $18 AND created_at < now() - $17 * interval '1 microsecond' AND {where}),
     gone AS (DELETE FROM {dead} d USING chosen c WHERE d.id = c.id RETURNING d.*),
     back AS (
       INSERT INTO {outbox} ({columns}, created_at, due_at)
       SELECT id, lane, name, body, content_type, headers, ordering_key,
              CASE WHEN $12::boolean THEN $13::text ELSE transport_name END, CASE WHEN $12 THEN $14::text ELSE exchange END,
              CASE WHEN $12 THEN $15::text ELSE routing_key END, CASE WHEN $12 THEN $16::text::jsonb ELSE route_headers END, created_at,
              CASE WHEN $11::bigint > 0
                THEN now() + (row_number() OVER (ORDER BY seq) - 1) * $11::bigint / count(*) OVER () * interval '1 microsecond' END
       FROM gone ORDER BY seq RETURNING 1),
     changed AS (SELECT count(*) AS n FROM back),
     noted AS (
       INSERT INTO {audit} (actor, reason, action, count, filter, destination)
       SELECT $8::text, $9::text, 'retry', n, $10::text::jsonb, CASE WHEN $12 THEN jsonb_build_object(
              'transport', $13::text, 'exchange', $14::text, 'routing_key', $15::text, 'headers', $16::text::jsonb) END
       FROM changed WHERE n > 0)
SELECT n, (SELECT count(*) FROM outlived) FROM changed`

// $8 who, $9 why, $10 the filter.
const deadRemoveSQL = `
WITH chosen AS MATERIALIZED (SELECT id FROM {dead} WHERE {where} FOR UPDATE SKIP LOCKED),
     gone AS (DELETE FROM {dead} d USING chosen c WHERE d.id = c.id RETURNING 1),
     changed AS (SELECT count(*) AS n FROM gone),
     noted AS (
       INSERT INTO {audit} (actor, reason, action, count, filter)
       SELECT $8::text, $9::text, 'remove', n, $10::text::jsonb FROM changed WHERE n > 0)
SELECT n, 0::bigint FROM changed`

const auditSQL = `SELECT at, actor, reason, action, count, filter, destination FROM {audit} ORDER BY id DESC LIMIT $1`

const auditPruneSQL = `
DELETE FROM {audit} WHERE id = ANY(ARRAY(
  SELECT id FROM {audit} WHERE at < now() - $1 * interval '1 microsecond' ORDER BY at LIMIT $2 FOR UPDATE SKIP LOCKED))`
