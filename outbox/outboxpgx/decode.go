package outboxpgx

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Other programs write to the table too. A row of theirs that is no message must not keep the others
// from being read: every column is scanned as something that cannot fail, and decoded by itself.

// record is a row of the columns of recordColumns. The id is scanned as bytes: of a uuid.UUID the
// client makes a text first.
type record struct {
	id                              [16]byte
	name, contentType               string
	body                            []byte
	headers                         []byte
	key                             pgtype.Text
	transport, exchange, routingKey string
	routeHeaders                    []byte
	createdAt                       pgtype.Timestamptz
	attempts                        int
	size                            int64 // of the body
	whole                           bool
}

// recordColumns are what a record is scanned from: texts where the row has texts, and a body where it
// is whole.
const recordColumns = `id, CASE WHEN texts THEN name ELSE left(name, 128) END, CASE WHEN texts THEN content_type ELSE '' END, CASE WHEN whole THEN body END,
  CASE WHEN texts THEN headers END, CASE WHEN texts THEN ordering_key END, CASE WHEN texts THEN transport_name ELSE '' END,
  CASE WHEN texts THEN exchange ELSE '' END, CASE WHEN texts THEN routing_key ELSE '' END, CASE WHEN texts THEN route_headers END,
  created_at, attempts, octet_length(body), whole`

// fits bounds what is read of a row o: its texts and headers as they are stored. A message that
// outbox.Prepare takes has less.
const fits = `octet_length(o.body) <= {max} AND octet_length(o.name) + octet_length(o.content_type) + octet_length(o.transport_name) + octet_length(o.exchange)
  + octet_length(o.routing_key) + coalesce(octet_length(o.ordering_key), 0) + coalesce(pg_column_size(o.headers), 0) + coalesce(pg_column_size(o.route_headers), 0) <= 65536`

// dest are the destinations of recordColumns, and of more behind them.
func (r *record) dest(more ...any) []any {
	return append([]any{
		&r.id, &r.name, &r.contentType, &r.body, &r.headers, &r.key, &r.transport, &r.exchange, &r.routingKey, &r.routeHeaders,
		&r.createdAt, &r.attempts, &r.size, &r.whole,
	}, more...)
}

// message decodes the record. With an error the message has what could be decoded.
func (r *record) message() (driver.Message, error) {
	m := driver.Message{
		ID: r.id, Name: r.name, ContentType: r.contentType, Body: r.body, Key: r.key.String, Transport: r.transport,
		Exchange: r.exchange, RoutingKey: r.routingKey,
		CreatedAt: r.createdAt.Time, Attempts: max(0, r.attempts),
	}
	var err1, err2, err3, err4 error
	if !r.whole {
		err4 = fmt.Errorf("too large to be read: a body of %d bytes, or more than 64 KiB beside it", r.size)
	}
	m.Headers, err1 = decodeHeaders("headers", r.headers)
	m.RouteHeaders, err2 = decodeHeaders("route_headers", r.routeHeaders)
	if r.createdAt.InfinityModifier != pgtype.Finite {
		err3 = errors.New("created_at is infinite")
	}
	return m, errors.Join(err1, err2, err3, err4)
}

// decodeHeaders takes [] for no headers: PHP writes an empty map like that.
func decodeHeaders(column string, text []byte) (map[string]string, error) {
	if len(text) == 0 || string(text) == "[]" {
		return nil, nil
	}
	var headers map[string]string
	if err := json.Unmarshal(text, &headers); err != nil {
		return nil, fmt.Errorf("%s is not a JSON object of strings: %w", column, err)
	}
	return headers, nil
}
