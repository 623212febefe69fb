// Package wire defines the headers of messages: ours on RabbitMQ, and those of Symfony Messenger and CloudEvents on
// RabbitMQ and Redis. Publishers and consumers share it. It imports no client.
package wire

import (
	"cmp"
	"fmt"
	"maps"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox/format"
)

// Our own headers. None starts with "x-", because the broker's headers do. Own lists them.
const (
	// HeaderAttempt counts the deliveries that reached a handler, from 1.
	HeaderAttempt = "holdfast-attempt"
	// HeaderRecovered counts the earlier failures that were recoverable.
	HeaderRecovered = "holdfast-recovered"
	// HeaderWait is the remaining part of a long delay, in milliseconds.
	HeaderWait = "holdfast-wait"
	// HeaderDelay is the delay, in milliseconds, of the queue in which the message waited.
	HeaderDelay = "holdfast-delay"
	// HeaderDue is the time at which a waiting message is due, by the clock of the process that delayed it.
	HeaderDue = "holdfast-due-at"
	// HeaderPutOff is "true" for a message that waits but has not failed.
	HeaderPutOff = "holdfast-put-off"
	// HeaderClass is the failure class of a dead letter.
	HeaderClass = "holdfast-failure-class"
	// HeaderError is the last error of a dead letter, shortened.
	HeaderError = "holdfast-error"
	// HeaderErrorType and HeaderSQLState are the last error's Go type and SQLSTATE.
	HeaderErrorType = "holdfast-error-type"
	HeaderSQLState  = "holdfast-sqlstate"
	// HeaderFingerprint is the same for failures of one kind.
	HeaderFingerprint = "holdfast-fingerprint"
	// HeaderHistory has the failures so far, encoded by package inbox/driver.
	HeaderHistory = "holdfast-history"
	// HeaderFirstFailed and HeaderLastFailed are times in RFC 3339.
	HeaderFirstFailed = "holdfast-first-failed-at"
	HeaderLastFailed  = "holdfast-last-failed-at"
	// HeaderConsumer names the consumer that gave the message up.
	HeaderConsumer = "holdfast-consumer"
	// HeaderOrigin is the queue that a dead letter came from.
	HeaderOrigin = "holdfast-origin-queue"
	// HeaderOriginExchange and HeaderOriginKey are the exchange and the routing key of the sender. A copy is
	// published elsewhere.
	HeaderOriginExchange = "holdfast-origin-exchange"
	HeaderOriginKey      = "holdfast-origin-routing-key"
	// HeaderReplays counts how often a dead letter was replayed.
	HeaderReplays = "holdfast-replays"
	// HeaderKey is the sender's ordering key. Messages without one have no such header.
	HeaderKey = "holdfast-key"
)

// HeaderRoutes is RabbitMQ's own header with an array of further routing keys. A message with an ordering key has
// the name of its slot there, as package partition computes it.
const HeaderRoutes = "CC"

// OfBroker reports whether RabbitMQ writes a header, or gives it a meaning. The outbox rejects messages with such a
// header. All other headers that start with "x-" belong to senders. The name must be in lower case, except CC and
// BCC.
func OfBroker(name string) bool {
	switch name {
	case HeaderRoutes, "BCC", "x-death",
		"x-first-death-exchange", "x-first-death-queue", "x-first-death-reason",
		"x-last-death-exchange", "x-last-death-queue", "x-last-death-reason",
		"x-delivery-count", "x-acquired-count",
		"x-opt-deaths", "x-opt-delivery-time", "x-opt-mqtt-client-id", "x-opt-rabbitmq-received-time", "x-opt-rabbitmq-sent-time":
		return true
	}
	return false
}

// Own reports whether a header is one of ours. A similar name belongs to a sender.
func Own(name string) bool {
	switch name {
	case HeaderAttempt, HeaderRecovered, HeaderWait, HeaderDelay, HeaderDue, HeaderPutOff, HeaderClass, HeaderError, HeaderFirstFailed, HeaderLastFailed,
		HeaderConsumer, HeaderOrigin, HeaderOriginExchange, HeaderOriginKey, HeaderReplays,
		HeaderErrorType, HeaderSQLState, HeaderFingerprint, HeaderHistory, HeaderKey:
		return true
	}
	return false
}

// maxHeader bounds an incoming header value, in bytes.
const maxHeader = 8 << 10

// HeaderString returns an AMQP header value as text. False: the value has no sensible text (a table, an array,
// bytes that are not UTF-8) or is too long.
func HeaderString(value any) (string, bool) {
	var s string
	switch v := value.(type) {
	case string:
		s = v
	case []byte:
		s = string(v)
	case bool:
		s = strconv.FormatBool(v)
	case int8, int16, int32, int64, int, uint8, uint16, uint32, uint64, float32, float64:
		s = fmt.Sprint(v)
	case time.Time:
		s = v.UTC().Format(time.RFC3339)
	default:
		return "", false
	}
	if len(s) > maxHeader || !utf8.ValidString(s) {
		return "", false
	}
	return s, true
}

// Form is the form of messages under a format.
type Form struct {
	Symfony *Symfony
	Events  *Events // nil: messages are not sent as events
}

// Own reports whether messages have this module's own form. Readers of that form can restore omitted parts.
func (f Form) Own() bool { return f.Events == nil && !f.Symfony.On() }

// Encode returns headers, body and content type of a message for a transport whose headers are texts. Sent reports whether
// it takes a header of the sender. The names of an event's attributes get the prefix.
func (f Form) Encode(e Event, body []byte, media, prefix string, sent func(name string) bool, from ...map[string]string) (all map[string]string, content []byte, mediaType string, err error) {
	all = make(map[string]string, 8)
	for _, headers := range from {
		for name, value := range headers {
			if sent(name) {
				all[name] = value
			}
		}
	}
	media = cmp.Or(media, JSON)
	f.Symfony.Headers(e.ID, e.Name, func(name, value string) { all[name] = value })
	if f.Events == nil {
		return all, body, media, nil
	}
	attributes := f.Events.Attributes(e, all)
	maps.DeleteFunc(all, func(name, _ string) bool { return NamesAttribute(name) })
	if f.Events.Structured() {
		body, media, err = Envelope(attributes, media, body)
		return all, body, media, err
	}
	for name, value := range attributes {
		all[prefix+name] = value
	}
	return all, body, media, nil
}

// NewForm returns the form for a format, or every violation in the format.
func NewForm(f format.Format) (Form, error) {
	plain := &Symfony{}
	switch f := f.(type) {
	case nil:
		return Form{Symfony: plain}, nil
	case format.Symfony:
		s, err := NewSymfony(f)
		return Form{Symfony: s}, err
	case format.CloudEvents:
		e, err := newEvents(f)
		return Form{Symfony: plain, Events: e}, err
	}
	return Form{Symfony: plain}, fmt.Errorf("%T is not a format of this module", f)
}

// JSON is the content type of a message that comes without one.
const JSON = "application/json"

// stampUnit is the precision of a time stamp on RabbitMQ.
const stampUnit = time.Second

// TimeInID reports whether the id contains the time at which a message was written, to the precision of a time
// stamp.
func TimeInID(id uuid.UUID, at time.Time) bool { return ids.Time(id).Sub(at).Abs() < stampUnit }

// PublishedAt returns when a message was written: its time stamp, else the time of a CloudEvent, else the time in
// the id. It returns zero if there is none.
func PublishedAt(stamp time.Time, headers map[string]string, id uuid.UUID) time.Time {
	if !stamp.IsZero() {
		return stamp
	}
	if at := eventTime(headers); !at.IsZero() {
		return at
	}
	if ids.Check(id) != nil || ids.Time(id).UnixMilli() == 0 { // parseDigits makes ids without a time
		return time.Time{}
	}
	return ids.Time(id)
}
