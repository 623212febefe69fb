package outboxamqp

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"maps"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// encode returns the message in its form on the wire.
func (p *Publisher) encode(m driver.Message) (amqpconn.Out, error) {
	if err := ids.Check(m.ID); err != nil {
		return amqpconn.Out{}, &driver.PublishError{Class: driver.Permanent, Err: err}
	}
	if len(m.Body) > maxBody {
		err := fmt.Errorf("body of %d bytes, at most %d are allowed", len(m.Body), maxBody)
		return amqpconn.Out{}, &driver.PublishError{Class: driver.Permanent, Err: err}
	}
	route := p.rules.Route(m)
	headers, body, typ := p.headers(m, route), m.Body, cmp.Or(m.ContentType, wire.JSON)
	if p.form.Events != nil {
		var err error
		if headers, body, typ, err = p.event(m, headers, typ); err != nil {
			return amqpconn.Out{}, &driver.PublishError{Class: driver.Permanent, Err: err}
		}
	}
	out := amqpconn.Out{
		Stripe:   stripe(m),
		Exchange: route.Exchange,
		Key:      route.RoutingKey,
		Message: amqp.Publishing{
			MessageId:    m.ID.String(),
			Type:         m.Name,
			ContentType:  typ,
			DeliveryMode: amqp.Persistent,
			Timestamp:    m.CreatedAt,
			Headers:      headers,
			Body:         body,
		},
	}
	if p.form.Own() {
		omitDefaults(&out.Message, m.ID)
	}
	return out, nil
}

// omitDefaults clears properties with values that readers of our own form assume anyway. A classic queue accepts
// messages faster if their properties have at most 64 bytes. Without headers, a name of up to 23 bytes fits.
func omitDefaults(m *amqp.Publishing, id uuid.UUID) {
	if m.ContentType == wire.JSON {
		m.ContentType = ""
	}
	if wire.TimeInID(id, m.Timestamp) {
		m.Timestamp = time.Time{}
	}
}

// stripe returns the same number for all messages of a key, and a random number for messages without a key.
func stripe(m driver.Message) uint32 {
	if m.Key == "" {
		return binary.BigEndian.Uint32(m.ID[12:]) // the random end of the id
	}
	h := fnv.New32a()
	h.Write([]byte(m.Key))
	return h.Sum32() >> 8 // the low bits of FNV alone are badly distributed
}

func (p *Publisher) headers(m driver.Message, route outbox.Route) amqp.Table {
	if len(m.Headers)+len(route.Headers) == 0 && m.Key == "" && !p.form.Symfony.On() {
		return nil
	}
	table := make(amqp.Table, len(m.Headers)+len(route.Headers)+4)
	for name, value := range m.Headers {
		table[name] = value
	}
	for name, value := range route.Headers {
		table[name] = value
	}
	if m.Key != "" {
		table[wire.HeaderKey] = m.Key
		table[wire.HeaderRoutes] = []any{partition.Slot(m.Key)}
	}
	p.form.Symfony.Headers(m.ID, m.Name, func(name, value string) { table[name] = value })
	return table
}

// event converts headers, body and content type to a CloudEvent.
func (p *Publisher) event(m driver.Message, headers amqp.Table, typ string) (amqp.Table, []byte, string, error) {
	texts := make(map[string]string, len(headers))
	for name, value := range headers {
		if text, ok := value.(string); ok {
			texts[name] = text
		}
	}
	e := wire.Event{ID: m.ID, Name: m.Name, Key: m.Key, Time: m.CreatedAt}
	attributes := p.form.Events.Attributes(e, texts)
	maps.DeleteFunc(headers, func(name string, _ any) bool { return wire.NamesAttribute(name) })
	if !p.form.Events.Structured() {
		if headers == nil {
			headers = make(amqp.Table, len(attributes))
		}
		for name, value := range attributes {
			headers[wire.EventPrefix+name] = value
		}
		return headers, m.Body, typ, nil
	}
	body, structured, err := wire.Envelope(attributes, typ, m.Body)
	if err == nil && len(body) > maxBody {
		err = fmt.Errorf("event of %d bytes, at most %d are allowed", len(body), maxBody)
	}
	return headers, body, structured, err
}
