package outboxpgx

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/txretry"
)

// WriterConfig tunes a Writer. The zero value works.
type WriterConfig struct {
	// Schema and Table are as in SchemaConfig.
	Schema, Table string
	// MaxBodyBytes is the largest body taken. Default: 1 MiB.
	MaxBodyBytes int
	// OnCommit is called after the commit of a transaction that wrote messages, if txretry manages
	// it. Give it Relay.Wake where a relay runs in the same process, and Notifier.Notify where it
	// does not. It must not block. Nil means nothing.
	OnCommit func()
	// DedupRetention is for how long WriteOnce remembers a key, at least 1 ms. 0 means 24 h. Remembered
	// keys are removed by Source.Prune.
	DedupRetention time.Duration
}

// Writer stores messages in the caller's transaction. It is safe for concurrent use.
type Writer struct {
	cfg WriterConfig
	t   tables
	sql statements
}

// NewWriter returns a Writer.
func NewWriter(cfg WriterConfig) (*Writer, error) {
	t, err := SchemaConfig{cfg.Schema, cfg.Table}.tables()
	if cfg.MaxBodyBytes < 0 {
		err = errors.Join(err, fmt.Errorf("outboxpgx: WriterConfig.MaxBodyBytes is %d, want 0 or more", cfg.MaxBodyBytes))
	}
	if cfg.DedupRetention == 0 {
		cfg.DedupRetention = 24 * time.Hour
	}
	if cfg.DedupRetention < time.Millisecond {
		err = errors.Join(err, fmt.Errorf("outboxpgx: WriterConfig.DedupRetention is %v, want at least 1 ms", cfg.DedupRetention))
	}
	if err != nil {
		return nil, err
	}
	return &Writer{cfg: cfg, t: t, sql: t.statements()}, nil
}

// Write stores messages as part of tx, in their order, with one statement. On a handle of txretry
// the statement runs together with COMMIT and its error comes out of Do; on any other transaction
// it runs at once.
//
// What outbox.Prepare refuses is refused here, as joined *outbox.MessageError, before anything is
// sent, and the transaction stays usable. A message id that is in the table already is the unique
// violation of Postgres (23505).
//
// Messages of one ordering key are published in the order in which they were written only if the
// transactions that write them are ordered: lock or update a row that belongs to the key before
// writing.
func (w *Writer) Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
	if tx == nil {
		return errors.New("outboxpgx: Write needs a transaction")
	}
	if len(msgs) == 0 {
		return nil
	}
	prepared, err := outbox.Prepare(ctx, msgs, w.cfg.MaxBodyBytes)
	if err != nil {
		return err
	}
	return w.store(ctx, tx, prepared)
}

// store inserts prepared messages, together with COMMIT where the handle can do that.
func (w *Writer) store(ctx context.Context, tx pgx.Tx, prepared []driver.Message) error {
	insert, args, err := w.insert(prepared)
	if err != nil {
		return err
	}
	if !w.t.missing().AtCommit(tx, insert, args...) {
		if _, err := tx.Exec(ctx, insert, args...); err != nil {
			return fmt.Errorf("outboxpgx: write: %w", w.t.explain(err))
		}
	}
	if w.cfg.OnCommit != nil {
		txretry.AfterCommit(tx, w.cfg.OnCommit)
	}
	return nil
}

// WriteSQL is Write for a transaction of database/sql, with any driver for Postgres. OnCommit is
// not called.
func (w *Writer) WriteSQL(ctx context.Context, tx *sql.Tx, msgs ...outbox.Message) error {
	if tx == nil {
		return errors.New("outboxpgx: WriteSQL needs a transaction")
	}
	if len(msgs) == 0 {
		return nil
	}
	prepared, err := outbox.Prepare(ctx, msgs, w.cfg.MaxBodyBytes)
	if err != nil {
		return err
	}
	arg, err := insertJSON(prepared)
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, w.sql.insertJSON, arg); err != nil {
		return fmt.Errorf("outboxpgx: write: %w", w.t.explain(err))
	}
	return nil
}

// insert returns the statement for the messages. A single one, the usual case, gets a statement of
// its own: unnesting eleven arrays costs the server more than the row.
func (w *Writer) insert(msgs []driver.Message) (string, []any, error) {
	if len(msgs) == 1 {
		r, err := rowOf(msgs[0])
		return w.sql.insertOne, []any{
			r.id, r.lane, r.name, r.body, r.contentType, r.headers, r.key,
			r.transport, r.exchange, r.routingKey, r.routeHeaders, r.notBefore,
		}, err
	}
	args, err := insertArgs(msgs)
	return w.sql.insert, args, err
}

// row is a message as its columns.
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

// insertArgs are the columns of the messages as one array each.
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

// insertJSON is the same as one JSON array, with the names of the columns.
func insertJSON(msgs []driver.Message) (string, error) {
	type object struct {
		ID           uuid.UUID         `json:"id"`
		Lane         int               `json:"lane"`
		Name         string            `json:"name"`
		Body         []byte            `json:"body"`
		ContentType  string            `json:"content_type"`
		Headers      map[string]string `json:"headers"`
		Key          *string           `json:"ordering_key"`
		Transport    string            `json:"transport_name"`
		Exchange     string            `json:"exchange"`
		RoutingKey   string            `json:"routing_key"`
		RouteHeaders map[string]string `json:"route_headers"`
		NotBefore    time.Time         `json:"not_before,omitzero"`
	}
	rows := make([]object, len(msgs))
	for i, m := range msgs {
		rows[i] = object{
			m.ID, driver.LaneOf(m), m.Name, append([]byte{}, m.Body...), m.ContentType, m.Headers,
			nullable(m.Key), m.Transport, m.Exchange, m.RoutingKey, m.RouteHeaders, m.NotBefore,
		}
	}
	text, err := json.Marshal(rows)
	if err != nil {
		return "", fmt.Errorf("outboxpgx: encode: %w", err)
	}
	return string(text), nil
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
