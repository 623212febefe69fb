package inboxamqp

import (
	"cmp"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// maxAttempt bounds the attempt count read from a header.
const maxAttempt = 1_000_000

// headerContentType is where a Symfony producer says what the body is.
const headerContentType = "Content-Type"

// arrived is convert for a consumer. A dead letter that somebody moved back by other means than
// DeadLetters, such as a shovel, counts as a replay.
func arrived(d amqp.Delivery, queue string) *inbox.Message {
	m := convert(d, queue)
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
func convert(d amqp.Delivery, queue string) *inbox.Message {
	return &inbox.Message{
		ID:            messageID(d),
		Name:          cmp.Or(d.Type, header(d, wire.HeaderType)),
		Body:          d.Body,
		ContentType:   contentType(d),
		Key:           header(d, wire.HeaderKey),
		Headers:       textHeaders(d.Headers),
		Attempt:       attempt(d),
		Recovered:     min(max(intHeader(d, wire.HeaderRecovered), 0), attempt(d)-1),
		Replays:       min(max(intHeader(d, wire.HeaderReplays), 0), maxAttempt),
		Redelivered:   d.Redelivered,
		Queue:         queue,
		PublishedAt:   d.Timestamp,
		FirstFailedAt: timeHeader(d, wire.HeaderFirstFailed),
		History:       driver.DecodeHistory(header(d, wire.HeaderHistory)),
	}
}

// contentType is that of the body. PHP's client puts text/plain on whatever has none, and a
// Symfony producer the right one into a header; without one its messages are JSON.
func contentType(d amqp.Delivery) string {
	if named := header(d, headerContentType); named != "" {
		return named
	}
	if d.ContentType == "text/plain" && header(d, wire.HeaderType) != "" {
		return ""
	}
	return d.ContentType
}

// messageID reads the property and then Symfony's stamp, whichever is a UUID first.
func messageID(d amqp.Delivery) uuid.UUID {
	if id, ok := parseID(d.MessageId); ok {
		return id
	}
	if text, ok := wire.DecodeStamp(header(d, stampHeader(d.Headers))); ok {
		if id, ok := parseID(text); ok {
			return id
		}
	}
	return uuid.Nil
}

// stampHeader is the name of the header with the id. Messenger's own serializer writes the
// stamp's class with its namespace, a serializer of one's own often without.
func stampHeader(headers amqp.Table) string {
	if headers[wire.HeaderStamp] != nil {
		return wire.HeaderStamp
	}
	first := ""
	for name := range headers {
		stamp := strings.HasPrefix(name, "X-Message-Stamp-") && strings.HasSuffix(name, `\MessageIdStamp`)
		if stamp && (first == "" || name < first) { // of several the same at each delivery
			first = name
		}
	}
	return cmp.Or(first, wire.HeaderStamp)
}

// parseID takes the canonical form only.
func parseID(text string) (uuid.UUID, bool) {
	if len(text) != 36 {
		return uuid.Nil, false
	}
	id, err := uuid.Parse(text)
	return id, err == nil
}

// textHeaders leaves out what belongs to the broker, our own bookkeeping and what has no text.
func textHeaders(table amqp.Table) map[string]string {
	var headers map[string]string
	for name, value := range table {
		if brokerHeader(name) || wire.Own(name) {
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

// brokerHeader reports whether RabbitMQ gives a meaning to a header. Sent back in a
// copy, CC and BCC would deliver it to other queues as well.
func brokerHeader(name string) bool {
	return strings.HasPrefix(name, "x-") || name == "CC" || name == "BCC"
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
