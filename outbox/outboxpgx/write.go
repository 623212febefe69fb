package outboxpgx

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// Write stores messages in order as part of tx, with one statement. On a handle of txretry, the statement is sent
// together with COMMIT if possible, and Do returns its error. On any other transaction it runs immediately. For a
// *sql.Tx see package txretrysql.
//
// The messages belong to the savepoint that is open at the call, however it was created. They use the role and the
// search_path of that moment: see txretry.AtCommit.
//
// If outbox.Prepare rejects a message, Write returns joined *outbox.MessageError and sends nothing. The transaction
// stays usable. If a message id exists in the table, Postgres returns a unique violation (23505).
//
// After the commit, a relay is woken: see the package documentation. For a transaction outside txretry, call Wake
// after the commit, or let relays poll.
//
// Messages of one ordering key are published in the order of the calls only if their transactions are ordered: before
// writing, lock or update a row that belongs to the key.
func (s *Store) Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
	if tx == nil {
		return errors.New("outboxpgx: Write needs a transaction")
	}
	if len(msgs) == 0 {
		return nil
	}
	prepared, err := outbox.Prepare(ctx, msgs, s.cfg.MaxBodyBytes)
	if err != nil {
		return err
	}
	return s.put(ctx, tx, prepared)
}

// put inserts prepared messages, together with COMMIT if the handle can do that.
func (s *Store) put(ctx context.Context, tx pgx.Tx, prepared []driver.Message) error {
	insert, args, err := s.insert(prepared)
	if err != nil {
		return err
	}
	if !s.t.missing().AtCommit(tx, insert, args...) {
		if _, err := tx.Exec(ctx, insert, args...); err != nil {
			return fmt.Errorf("outboxpgx: write: %w", s.t.explain(err))
		}
	}
	txdriver.Hint(tx, s.afterCommit)
	return nil
}

// insert returns the statement for the messages. A single message, the usual case, has a separate statement, because
// unnesting eleven arrays costs the server more than the row.
func (s *Store) insert(msgs []driver.Message) (string, []any, error) {
	if len(msgs) == 1 {
		r, err := rowOf(msgs[0])
		return s.sql.insertOne, []any{
			r.id, r.lane, r.name, r.body, r.contentType, r.headers, r.key,
			r.transport, r.exchange, r.routingKey, r.routeHeaders, r.notBefore,
		}, err
	}
	args, err := insertArgs(msgs)
	return s.sql.insert, args, err
}

// WriteOnce is like Write for one message that may be written only once per key. If a message was written with the
// key within Config.DedupRetention, WriteOnce writes nothing and returns the id of that message and false. The key is
// stored when tx commits, independent of the message's outcome. driver.CheckDedupKey defines valid keys.
//
// Unlike the message, the key is written immediately. Of two transactions with the same key, the second waits for the
// end of the first. At REPEATABLE READ and above, it may then fail with 40001, which txretry retries.
func (s *Store) WriteOnce(ctx context.Context, tx pgx.Tx, key string, m outbox.Message) (id uuid.UUID, first bool, err error) {
	if tx == nil {
		return uuid.Nil, false, errors.New("outboxpgx: WriteOnce needs a transaction")
	}
	prepared, err := outbox.Prepare(ctx, []outbox.Message{m}, s.cfg.MaxBodyBytes)
	if refused := driver.CheckDedupKey(key); refused != nil {
		err = errors.Join(&outbox.MessageError{Field: "DedupKey", Problem: refused.Error()}, err)
	}
	if err != nil {
		return uuid.Nil, false, err
	}
	for range 2 { // a key may expire and be pruned between the two statements
		var stored bool
		var written pgtype.UUID
		err := tx.QueryRow(ctx, s.sql.remember, key, prepared[0].ID, s.cfg.DedupRetention.Microseconds()).Scan(&stored, &written)
		if err == nil && stored {
			return prepared[0].ID, true, s.put(ctx, tx, prepared)
		}
		routed := false
		if err == nil && !written.Valid { // a separate statement, because the key may be newer than the first statement's snapshot
			err = tx.QueryRow(ctx, s.sql.recall, key).Scan(&written, &routed)
		}
		switch {
		case err == nil && !routed:
			return written.Bytes, false, nil
		case err == nil:
			return uuid.Nil, false, s.keyIgnored(key)
		case !errors.Is(err, pgx.ErrNoRows):
			return uuid.Nil, false, fmt.Errorf("outboxpgx: write once: %w", s.t.explain(err))
		}
	}
	return uuid.Nil, false, s.keyIgnored(key)
}

func (s *Store) keyIgnored(key string) error {
	return fmt.Errorf("outboxpgx: write once: %w", pgcall.Ignored(s.t.dedup, fmt.Sprintf("key %q", key)))
}

// row has the column values of a message.
type row struct {
	id                              pgtype.UUID
	lane                            int16
	name, contentType               string
	body                            []byte
	headers, key                    *string
	transport, exchange, routingKey string
	routeHeaders                    *string
	notBefore                       *time.Time
}

func rowOf(m driver.Message) (row, error) {
	headers, err1 := encodeHeaders(m.Headers)
	routeHeaders, err2 := encodeHeaders(m.RouteHeaders)
	r := row{
		id: pgtype.UUID{Bytes: m.ID, Valid: true}, lane: int16(driver.LaneOf(m)), name: m.Name, contentType: m.ContentType, body: m.Body,
		headers: headers, key: nullable(m.Key), transport: m.Transport,
		exchange: m.Exchange, routingKey: m.RoutingKey, routeHeaders: routeHeaders,
	}
	if r.body == nil {
		r.body = []byte{}
	}
	if !m.NotBefore.IsZero() {
		r.notBefore = &m.NotBefore
	}
	return r, errors.Join(err1, err2)
}

// insertArgs returns one array per column of the messages.
func insertArgs(msgs []driver.Message) ([]any, error) {
	n := len(msgs)
	ids, lanes, bodies := make(uuids, n), make([]int16, n), make([][]byte, n)
	names, types, transports := make([]string, n), make([]string, n), make([]string, n)
	exchanges, routingKeys := make([]string, n), make([]string, n)
	headers, routeHeaders, keys := make([]*string, n), make([]*string, n), make([]*string, n)
	notBefores := make([]*time.Time, n)
	for i, m := range msgs {
		r, err := rowOf(m)
		if err != nil {
			return nil, err
		}
		ids[i], lanes[i], names[i], bodies[i], types[i] = r.id, r.lane, r.name, r.body, r.contentType
		headers[i], keys[i], transports[i] = r.headers, r.key, r.transport
		exchanges[i], routingKeys[i], routeHeaders[i] = r.exchange, r.routingKey, r.routeHeaders
		notBefores[i] = r.notBefore
	}
	return []any{ids, lanes, names, bodies, types, headers, keys, transports, exchanges, routingKeys, routeHeaders, notBefores}, nil
}

func encodeHeaders(headers map[string]string) (*string, error) {
	if len(headers) == 0 {
		return nil, nil
	}
	text, err := json.Marshal(headers)
	if err != nil {
		return nil, fmt.Errorf("outboxpgx: encode headers: %w", err)
	}
	s := string(text)
	return &s, nil
}

func nullable(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// columns are the columns of a message in all tables.
const columns = `id, lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers`

// insertOneSQL stores one message, the usual case. It costs the server less than insertSQL. Like insertSQL, it fails
// if the table ignores a message. Nobody reads its result, because it may be sent together with COMMIT.
const insertOneSQL = `
WITH stored AS (
  INSERT INTO {outbox} ({columns}, due_at)
  VALUES ($1, $2, $3, $4, $5, $6::text::jsonb, $7, $8, $9, $10, $11::text::jsonb, CASE WHEN $12::timestamptz > now() THEN $12::timestamptz END)
  RETURNING 1)
SELECT CASE WHEN count(*) < 1 THEN {ignored}({outboxName}, 1) END FROM stored`

// insertSQL stores messages, one array per column. seq follows the order of the arguments, so each key keeps its
// order.
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

// rememberSQL stores a key of WriteOnce. It returns whether it stored the key, and otherwise the id stored before. It
// changes no row if the key exists and has not expired, and replaces an expired key. $1 key, $2 id, $3 microseconds
// until it expires.
const rememberSQL = `
WITH stored AS (
  INSERT INTO {dedup} AS d (key, id, expires_at) VALUES ($1, $2, now() + $3 * interval '1 microsecond')
  ON CONFLICT (key) DO UPDATE SET id = EXCLUDED.id, expires_at = EXCLUDED.expires_at WHERE d.expires_at <= now()
  RETURNING 1)
SELECT EXISTS (SELECT FROM stored), (SELECT id FROM {dedup} WHERE key = $1 AND expires_at > now() LIMIT 1)`

// recallSQL returns the id of a key that rememberSQL met but could not see, and whether this transaction wrote the
// row. Such a row is not a duplicate: a trigger of rememberSQL created it. A row written in a savepoint has a
// separate xid, which pg_xact_status reports as in progress until the transaction ends. pg_xact_status needs 64 bits,
// but xmin has 32. $1 key.
const recallSQL = `
SELECT id, pg_xact_status((top + ((xmin::text::bigint - top + (1::bigint << 31)) & ((1::bigint << 32) - 1)) - (1::bigint << 31))::text::xid8) = 'in progress'
FROM {dedup}, CAST(pg_current_xact_id()::text AS bigint) AS top WHERE key = $1 AND expires_at > now() LIMIT 1`
