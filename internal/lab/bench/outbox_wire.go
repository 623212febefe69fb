package main

import (
	"context"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/ids"
)

const bareMessage = "body and content type alone"

// benchWire is what each part of what the relay sends costs the broker, by the bare client.
func benchWire(ctx context.Context, b *bench) error {
	for _, k := range queueKinds {
		d, err := newDrain(ctx, b, k.args)
		if err != nil {
			return err
		}
		id := func(m *amqp.Publishing) { m.MessageId = ids.New().String() }
		name := func(m *amqp.Publishing) { m.Type = d.queue }
		untyped := func(m *amqp.Publishing) { m.ContentType = "" }
		now := func(m *amqp.Publishing) { m.Timestamp = time.Now() }
		empty := func(m *amqp.Publishing) { m.Headers = amqp.Table{} }
		header := func(m *amqp.Publishing) { m.Headers = amqp.Table{"name": "value"} }
		row := func(title string, mandatory bool, parts ...func(*amqp.Publishing)) contender {
			return d.contender(title, 1, func(_ context.Context, n int, watch *stopwatch) (int, error) {
				return d.publishRaw(n, watch, mandatory, func(m *amqp.Publishing) {
					for _, part := range parts {
						part(m)
					}
				})
			})
		}
		if _, err := b.measure(ctx, table{
			title:      fmt.Sprintf("outbox, wire format, %d messages to a %s queue", b.messages, k.name),
			columns:    []column{{name: "messages/s"}},
			yardsticks: []string{bareMessage},
			contenders: []contender{
				row(bareMessage, false),
				row("and mandatory", true),
				row("and message_id", false, id),
				row("and type", false, name),
				row("and timestamp", false, now),
				row("and an empty header table", false, empty),
				row("and one header", false, header),
				row("all that the relay sends", true, untyped, id, name),
				row("all but mandatory", false, untyped, id, name),
				row("all, and the content type", true, id, name),
				row("all, the content type and timestamp", true, id, name, now),
			},
		}); err != nil {
			return err
		}
	}
	return nil
}
