package amqpconn

import (
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	// maxShort is the length of AMQP's short strings. The client breaks the
	// connection over a longer one.
	maxShort = 255
	// maxHeaders bounds the headers of one message: they must fit in one frame,
	// 128 KiB on a broker with default settings.
	maxHeaders = 64 << 10
	// MaxBody bounds the body of one message: RabbitMQ's default limit.
	MaxBody = 128 << 20
)

// validate refuses what would close the channel, or the connection, for all.
func validate(out Out) error {
	m := out.Message
	for _, short := range [...]struct{ what, value string }{
		{"exchange", out.Exchange},
		{"routing key", out.Key},
		{"message id", m.MessageId},
		{"type", m.Type},
		{"content type", m.ContentType},
		{"content encoding", m.ContentEncoding},
		{"correlation id", m.CorrelationId},
		{"reply-to", m.ReplyTo},
		{"app id", m.AppId},
		{"user id", m.UserId},
	} {
		if len(short.value) > maxShort {
			return fmt.Errorf("%w: %s of %d bytes, at most %d are allowed", ErrInvalid, short.what, len(short.value), maxShort)
		}
	}
	if len(m.Body) > MaxBody {
		return fmt.Errorf("%w: body of %d bytes, at most %d are allowed", ErrInvalid, len(m.Body), MaxBody)
	}
	for _, name := range [...]string{"CC", "BCC"} {
		if _, list := m.Headers[name].([]any); m.Headers[name] != nil && !list {
			return fmt.Errorf("%w: RabbitMQ wants a list in the header %s", ErrInvalid, name)
		}
	}
	if err := m.Headers.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	size, err := tableSize(m.Headers)
	if err == nil && size > maxHeaders {
		err = fmt.Errorf("headers of %d bytes, at most %d are allowed", size, maxHeaders)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

// maxProperties is more than the frame of any message's properties has.
const maxProperties = maxHeaders + 16*(maxShort+1)

// propertiesSize returns how large the frame of a message's properties is at most.
func propertiesSize(m amqp.Publishing) int {
	size := 64 // what has a fixed size
	for _, short := range [...]string{
		m.ContentType, m.ContentEncoding, m.CorrelationId, m.ReplyTo, m.Expiration, m.MessageId, m.Type, m.UserId, m.AppId,
	} {
		size += 1 + len(short)
	}
	headers, _ := tableSize(m.Headers) // validate has seen the error
	return size + headers
}

// tableSize returns how large a table is on the wire at most, without its length.
func tableSize(t amqp.Table) (int, error) {
	size := 0
	for key, value := range t {
		if len(key) > maxShort {
			return 0, fmt.Errorf("header name of %d bytes, at most %d are allowed", len(key), maxShort)
		}
		n, err := valueSize(value)
		if err != nil {
			return 0, err
		}
		size += 1 + len(key) + n
	}
	return size, nil
}

// valueSize includes the byte that names the type.
func valueSize(value any) (int, error) {
	const number, length = 1 + 8, 1 + 4
	switch v := value.(type) {
	case string:
		return length + len(v), nil
	case []byte:
		return length + len(v), nil
	case amqp.Table:
		n, err := tableSize(v)
		return length + n, err
	case []any:
		size := length
		for _, item := range v {
			n, err := valueSize(item)
			if err != nil {
				return 0, err
			}
			size += n
		}
		return size, nil
	default:
		return number, nil
	}
}
