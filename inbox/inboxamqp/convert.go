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
// The name of a message is the property type, else the stamp MessageNameStamp of Symfony Messenger, else the
// header type; Queue.Format maps PHP's classes to names. Its id is the property message_id, else the stamp
// MessageIdStamp. Without content_type the body is JSON. Without timestamp the message is as old as the time in
// its id. Package outbox/format describes how CloudEvents are read. A body of more than 16 MiB becomes a dead
// letter of class validation. Dead letters that were moved back without Replay, for example by a shovel, start at
// attempt 1 again.
//
// Only Setup declares queues. Existing queues are used as they are. The consumer relies on the broker's default
// consumer_timeout of 30 minutes; a shorter one is too short for large batches.
//
// If a quorum queue is deleted and declared again at once, RabbitMQ 3.10 may not notify its consumers, or may lose
// its route to them. They then receive nothing until they reconnect. Wait two seconds between the two.
//
// The client cannot receive a message with headers nested more than 32 deep, or with more than 8192 headers in one
// table. Each time, it breaks the connection with "invalid field or value inside of a frame". Remove such a
// message from the queue by other means.

// maxAttempt bounds the attempt count read from a header.
const maxAttempt = 1_000_000

// headerContentType is the header in which a Symfony producer names the content type of the body.
const headerContentType = "Content-Type"

// arrived converts a delivery for a consumer with its Queue.Format. A dead letter that was moved back without
// DeadLetters, for example by a shovel, counts as a replay.
func arrived(d amqp.Delivery, queue string, by *wire.Symfony) *inbox.Message {
	m := convert(d, queue, by)
	if isDead(d) {
		m.Replays++
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = 1, 0, time.Time{}, nil
	}
	return m
}

// isDead reports whether deadCopy made the message.
func isDead(d amqp.Delivery) bool { return d.Headers[wire.HeaderClass] != nil }

// convert returns the message of a delivery. Unreadable fields stay empty, and inbox.Message.Validate reports
// them.
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
	if !readable { // otherwise a handler could mistake the envelope for its own JSON
		m.Name = ""
	}
	return m
}

// contentType returns the content type of the body, JSON by default. PHP's client sets text/plain on a message
// without a type, and a Symfony producer sets the right type in a header.
func contentType(d amqp.Delivery) string {
	if named := header(d, headerContentType); named != "" {
		return named
	}
	if d.ContentType == "text/plain" && header(d, wire.HeaderType) != "" {
		return wire.JSON
	}
	return cmp.Or(d.ContentType, wire.JSON)
}

// stampHeader returns the name of a header with the id, or "".
func stampHeader(headers amqp.Table) string {
	first := ""
	for name, value := range headers {
		text, _ := wire.HeaderString(value)
		if wire.CarriesID(name, text) && (first == "" || name < first) { // if there are several, choose the same one at each delivery
			first = name
		}
	}
	return first
}

// textHeaders omits the broker's headers, our own bookkeeping and values that are not text.
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

// header returns a header as text, empty if it is missing or not text.
func header(d amqp.Delivery, name string) string {
	text, _ := wire.HeaderString(d.Headers[name])
	return text
}

func attempt(d amqp.Delivery) int {
	return min(max(intHeader(d, wire.HeaderAttempt), 1), maxAttempt)
}

// intHeader returns 0 if the header is missing or not a number.
func intHeader(d amqp.Delivery, name string) int {
	text := header(d, name)
	if text == "" { // the usual case; making an error would cost more than everything else here
		return 0
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}

// timeHeader returns the zero time if the header is missing or not a time.
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

// waitHeader returns the rest of a long delay.
func waitHeader(d amqp.Delivery, limit time.Duration) time.Duration {
	millis := min(max(intHeader(d, wire.HeaderWait), 0), int(limit/time.Millisecond))
	return time.Duration(millis) * time.Millisecond
}
