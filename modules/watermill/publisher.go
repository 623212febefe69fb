package watermillbridge

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

const (
	// MetadataKey is the metadata with the ordering key: the messages of one key stay in order.
	MetadataKey = "ordering-key"

	// metadataType is where Watermill's users put a content type.
	metadataType = "Content-Type"

	typeJSON  = "application/json"
	typeBytes = "application/octet-stream"
)

// Publisher is a message.Publisher of Watermill. Its methods may be called from any goroutine, if its
// function may.
type Publisher struct {
	send func(ctx context.Context, m outbox.Message) error
}

// NewPublisher returns a Publisher that hands each message to send, with the message's own context. Send
// returns once the message is where it belongs.
func NewPublisher(send func(ctx context.Context, m outbox.Message) error) *Publisher {
	return &Publisher{send}
}

// Direct returns a function for NewPublisher that sends past any outbox, such as by an outboxredis.Publisher
// or an outboxamqp.Publisher whose Run is at work, and returns with the broker's confirm. A payload of over
// 1 MiB is refused.
func Direct(to driver.Publisher) func(ctx context.Context, m outbox.Message) error {
	return func(ctx context.Context, m outbox.Message) error {
		prepared, err := outbox.Prepare(ctx, []outbox.Message{m}, 0)
		if err != nil {
			return err
		}
		prepared[0].CreatedAt = time.Now() // a store sets it otherwise
		outcome := make(chan error, 1)
		to.Publish(ctx, prepared[0], func(err error) { outcome <- err })
		return <-outcome
	}
}

// Publish sends the messages one after the other. What comes after one that fails is not sent.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	if p.send == nil {
		return errors.New("watermillbridge: NewPublisher was given no function")
	}
	for _, m := range messages {
		if err := p.send(m.Context(), outgoing(topic, m)); err != nil {
			return fmt.Errorf("watermillbridge: publish to %s: %w", topic, err)
		}
	}
	return nil
}

// Close does nothing: Publish has returned with everything sent, and what sends is the caller's.
func (p *Publisher) Close() error { return nil }

// outgoing is a message of Watermill as one of ours. Whatever texts it has, an outbox takes them.
func outgoing(topic string, m *message.Message) outbox.Message {
	metadata := maps.Clone(map[string]string(m.Metadata))
	if metadata == nil {
		metadata = map[string]string{}
	}
	typ, key := metadata[metadataType], metadata[MetadataKey]
	for _, own := range []string{metadataType, MetadataKey, headerUUID, headerType, headerKey, headerEscaped, headerLeftOut} {
		delete(metadata, own)
	}
	out := outbox.Message{Name: topic, Body: m.Payload, ContentType: typ, Key: keyOf(key)}
	if out.Key != key {
		metadata[headerKey] = key
	}
	if typ == "" {
		out.ContentType = typeJSON
	}
	if !fits(out.ContentType, m.Payload) {
		out.ContentType = typeBytes
		if typ != "" {
			metadata[headerType] = typ
		}
	}
	if id, err := ids.Parse(m.UUID); err == nil && id.String() == m.UUID {
		out.ID = id
	} else {
		out.ID = uuid.Must(uuid.NewV7())
		metadata[headerUUID] = m.UUID
	}
	out.Headers = carried(metadata)
	return out
}
