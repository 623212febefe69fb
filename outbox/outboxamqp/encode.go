package outboxamqp

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// encode returns the message as it goes over the wire.
func (p *Publisher) encode(m driver.Message) (amqpconn.Out, error) {
	if err := ids.Check(m.ID); err != nil {
		return amqpconn.Out{}, &driver.PublishError{Class: driver.Permanent, Err: err}
	}
	if len(m.Body) > maxBody {
		err := fmt.Errorf("body of %d bytes, at most %d are allowed", len(m.Body), maxBody)
		return amqpconn.Out{}, &driver.PublishError{Class: driver.Permanent, Err: err}
	}
	route := p.rules.Route(m)
	return amqpconn.Out{
		Stripe:   stripe(m),
		Exchange: route.Exchange,
		Key:      route.RoutingKey,
		Message: amqp.Publishing{
			MessageId:    m.ID.String(),
			Type:         m.Name,
			ContentType:  cmp.Or(m.ContentType, "application/json"),
			DeliveryMode: amqp.Persistent,
			Timestamp:    m.CreatedAt,
			Headers:      p.headers(m, route),
			Body:         m.Body,
		},
	}, nil
}

// stripe is the same for all messages of a key, and any number for the others.
func stripe(m driver.Message) uint32 {
	if m.Key == "" {
		return binary.BigEndian.Uint32(m.ID[12:]) // the random end of the id
	}
	h := fnv.New32a()
	h.Write([]byte(m.Key))
	return h.Sum32() >> 8 // the low bits of FNV alone are weak
}

func (p *Publisher) headers(m driver.Message, route outbox.Route) amqp.Table {
	if len(m.Headers)+len(route.Headers) == 0 && m.Key == "" && !p.symfony.On() {
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
	p.symfony.Headers(m.ID, m.Name, func(name, value string) { table[name] = value })
	return table
}
