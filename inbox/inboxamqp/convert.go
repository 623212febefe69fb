package inboxamqp

import (
	"cmp"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// Names and limits.
//
// The name of a message is the property type, else that of a stamp MessageNameStamp of Symfony
// Messenger, else the header type, and Queue.Format has names for PHP's classes; its id is the property
// message_id, else that of a stamp MessageIdStamp. Without content_type the body is JSON, and without timestamp the message
// was written at the time in its id. CloudEvents are read as package outbox/format says. A body of more than 16 MiB is a dead letter of class validation. Dead letters that
// were moved back by other means than Replay, a shovel for example, begin anew. Queues are
// declared by Setup and by nothing else, and those that exist are used as they are. A consumer_timeout of the broker below its default of 30 minutes is too short for
// large batches: the consumer counts on the default.
//
// RabbitMQ 3.10 may not tell the consumers of a quorum queue that it was deleted, or lose the way
// to them, when the queue is declared again at once: they then get nothing until they connect
// anew. Leave two seconds between.
//
// The client cannot receive a message with headers nested more than 32 deep, or with more
// than 8192 in one table: it breaks the connection with "invalid field or value inside of
// a frame", again and again. Such a message must be removed from the queue by other means.

// maxAttempt bounds the attempt count read from a header.
const maxAttempt = 1_000_000

// headerContentType is where a Symfony producer says what the body is.
const headerContentType = "Content-Type"

// arrived is convert for a consumer, by its Queue.Format. A dead letter that came back by other means than
// DeadLetters, such as a shovel, counts as a replay.
func arrived(d amqp.Delivery, queue string, by *wire.Symfony) *inbox.Message {
	m := convert(d, queue, by)
	if isDead(d) {
		m.Replays++
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = 1, 0, time.Time{}, nil
	}
	return m
}

// isDead reports whether deadCopy has made a message.
func isDead(d amqp.Delivery) bool { return d.Headers[wire.HeaderClass] != nil }

// convert returns the message in a delivery. What cannot be read stays empty, for
// inbox.Message.Validate to find.
func convert(d amqp.Delivery, queue string, by *wire.Symfony) *inbox.Message {
	headers, body, media, readable := by.Opened(textHeaders(d.Headers), d.Body, contentType(d))
	m := &inbox.Message{
		ID:          by.ID(d.MessageId, headers),
		Name:        by.Name(d.Type, headers),
		Body:        body,
		ContentType: media, ContentEncoding: d.ContentEncoding, CorrelationID: d.CorrelationId, ReplyTo: d.ReplyTo,
		Key:           cmp.Or(header(d, wire.HeaderKey), wire.EventAttribute(headers, "partitionkey")),
		Headers:       headers,
		Attempt:       attempt(d),
		Recovered:     min(max(intHeader(d, wire.HeaderRecovered), 0), attempt(d)-1),
		Replays:       min(max(intHeader(d, wire.HeaderReplays), 0), maxAttempt),
		Redelivered:   d.Redelivered,
		Queue:         queue,
		FirstFailedAt: timeHeader(d, wire.HeaderFirstFailed),
		History:       driver.DecodeHistory(header(d, wire.HeaderHistory)),
	}
	m.PublishedAt = wire.PublishedAt(d.Timestamp, headers, m.ID)
	if !readable { // no handler must take the envelope for its own JSON
		m.Name = ""
	}
	return m
}

// contentType is that of the body; without one it is JSON. PHP's client puts text/plain on whatever has
// none, and a Symfony producer the right one into a header.
func contentType(d amqp.Delivery) string {
	if named := header(d, headerContentType); named != "" {
		return named
	}
	if d.ContentType == "text/plain" && header(d, wire.HeaderType) != "" {
		return wire.JSON
	}
	return cmp.Or(d.ContentType, wire.JSON)
}

// stampHeader is the name of a header with the id; there may be none.
func stampHeader(headers amqp.Table) string {
	first := ""
	for name, value := range headers {
		text, _ := wire.HeaderString(value)
		if wire.CarriesID(name, text) && (first == "" || name < first) { // of several the same at each delivery
			first = name
		}
	}
	return first
}

// textHeaders leaves out what belongs to the broker, our own bookkeeping and what has no text.
func textHeaders(table amqp.Table) map[string]string {
	var headers map[string]string
	for name, value := range table {
		if wire.OfBroker(name) || wire.Own(name) {
			continue
		}
		if text, ok := wire.HeaderString(value); ok {
			if headers == nil {
				headers = make(map[string]string, len(table))
			}
			headers[name] = text
		}
	}
	return headers
}

// header returns a header as text, empty when it is missing or has none.
func header(d amqp.Delivery, name string) string {
	text, _ := wire.HeaderString(d.Headers[name])
	return text
}

func attempt(d amqp.Delivery) int {
	return min(max(intHeader(d, wire.HeaderAttempt), 1), maxAttempt)
}

// intHeader returns 0 for what is no number.
func intHeader(d amqp.Delivery, name string) int {
	text := header(d, name)
	if text == "" { // as a rule: an error would cost more than all the rest
		return 0
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}

// timeHeader returns the zero time for what is no time.
func timeHeader(d amqp.Delivery, name string) time.Time {
	text := header(d, name)
	if text == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return time.Time{}
	}
	return t
}

// waitHeader is what remains of a long delay.
func waitHeader(d amqp.Delivery, limit time.Duration) time.Duration {
	millis := min(max(intHeader(d, wire.HeaderWait), 0), int(limit/time.Millisecond))
	return time.Duration(millis) * time.Millisecond
}
