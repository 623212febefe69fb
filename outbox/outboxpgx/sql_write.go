package outboxpgx

// columns are those that every form of a message shares.
const columns = `id, lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers`

// insertOneSQL stores one message, the usual case: it costs the server less than insertSQL. Like that it fails where the
// table ignores a message. Nobody reads its result, since COMMIT may travel with it.
const insertOneSQL = `
WITH stored AS (
  INSERT INTO {outbox} ({columns}, due_at)
  VALUES ($1, $2, $3, $4, $5, $6::text::jsonb, $7, $8, $9, $10, $11::text::jsonb, CASE WHEN $12::timestamptz > now() THEN $12::timestamptz END)
  RETURNING 1)
SELECT CASE WHEN count(*) < 1 THEN {ignored}({outboxName}, 1) END FROM stored`

// insertSQL stores messages, one array per column. seq follows the order of the arguments, so a key keeps
// its order.
const insertSQL = `
WITH stored AS (
  INSERT INTO {outbox} ({columns}, due_at)
  SELECT id, lane, name, body, content_type, headers::jsonb, ordering_key, transport_name, exchange, routing_key, route_headers::jsonb,
         CASE WHEN not_before > now() THEN not_before END
  FROM unnest($1::uuid[], $2::smallint[], $3::text[], $4::bytea[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[], $11::text[],
              $12::timestamptz[])
       WITH ORDINALITY AS m(id, lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers, not_before, n)
  ORDER BY n
  RETURNING 1)
SELECT CASE WHEN count(*) < cardinality($1::uuid[]) THEN {ignored}({outboxName}, cardinality($1::uuid[]) - count(*)) END FROM stored`

// rememberSQL stores a key of WriteOnce. No row is changed where the key is remembered already. A key that
// has expired is taken over. $1 key, $2 id, $3 microseconds until it expires.
const rememberSQL = `
INSERT INTO {dedup} AS d (key, id, expires_at) VALUES ($1, $2, now() + $3 * interval '1 microsecond')
ON CONFLICT (key) DO UPDATE SET id = EXCLUDED.id, expires_at = EXCLUDED.expires_at WHERE d.expires_at <= now()`

// recallSQL returns the id of the message that was written with a key that has not expired. $1 key.
const recallSQL = `SELECT id FROM {dedup} WHERE key = $1 AND expires_at > now()`
