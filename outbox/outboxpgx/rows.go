package outboxpgx

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

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
