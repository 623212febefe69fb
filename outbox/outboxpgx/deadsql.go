package outboxpgx

import "strings"

// deadStatements are the SQL of DeadLetters, with the table names filled in.
type deadStatements struct {
	list, count, retry, remove string
}

func (t tables) deadStatements() deadStatements {
	fill := func(sql string) string { return t.fill(strings.ReplaceAll(sql, "{where}", deadWhere)) }
	return deadStatements{list: fill(deadListSQL), count: fill(deadCountSQL), retry: fill(deadRetrySQL), remove: fill(deadRemoveSQL)}
}

// deadWhere is the filter of dead letters: an argument that is null does not filter.
const deadWhere = `
  ($1::uuid[] IS NULL OR id = ANY($1)) AND ($2::text IS NULL OR error_class = $2) AND ($3::text IS NULL OR name = $3)
  AND ($4::text IS NULL OR ordering_key = $4) AND ($5::bigint IS NULL OR died_at <= now() - $5 * interval '1 microsecond')
  AND ($7::text IS NULL OR position($7 IN last_error) > 0)
ORDER BY died_at, seq LIMIT $6`

const deadListSQL = `
SELECT id, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers, created_at, attempts,
       error_class, last_error, died_at
FROM {dead} WHERE {where}`

const deadCountSQL = `SELECT count(*) FROM (SELECT FROM {dead} WHERE {where}) d`

// Locked before they are deleted, so that two at once do not retry one letter twice.
// $8 microseconds to spread them over, $9 whether they go elsewhere, $10 transport, $11 exchange,
// $12 routing key, $13 route headers.
const deadRetrySQL = `
WITH chosen AS MATERIALIZED (
       SELECT id FROM {dead} d WHERE NOT EXISTS (SELECT FROM {outbox} o WHERE o.id = d.id) AND {where} FOR UPDATE OF d SKIP LOCKED),
     gone AS (DELETE FROM {dead} d USING chosen c WHERE d.id = c.id RETURNING d.*)
INSERT INTO {outbox} ({columns}, created_at, due_at)
SELECT id, lane, name, body, content_type, headers, ordering_key,
       CASE WHEN $9::boolean THEN $10::text ELSE transport_name END, CASE WHEN $9 THEN $11::text ELSE exchange END,
       CASE WHEN $9 THEN $12::text ELSE routing_key END, CASE WHEN $9 THEN $13::text::jsonb ELSE route_headers END, created_at,
       CASE WHEN $8::bigint > 0
         THEN now() + (row_number() OVER (ORDER BY seq) - 1) * $8::bigint / count(*) OVER () * interval '1 microsecond' END
FROM gone ORDER BY seq`

const deadRemoveSQL = `
WITH chosen AS MATERIALIZED (SELECT id FROM {dead} WHERE {where} FOR UPDATE SKIP LOCKED)
DELETE FROM {dead} d USING chosen c WHERE d.id = c.id`
