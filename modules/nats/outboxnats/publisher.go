package outboxnats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/internal/outbox/stored"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/modules/nats/internal/form"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
)

// defaultTopic is the topic if none is configured.
const defaultTopic = "outbox"

// window is the largest number of unacknowledged messages: two batches of a relay. Publish waits for room.
const window = 1000

// Config tunes a Publisher. The zero value works.
type Config struct {
	// Topic is the start of the subjects of messages whose route names no exchange: <topic>.<message name>. Default:
	// "outbox".
	Topic string
	// Routes maps message names to the topic (Route.Exchange), the rest of the subject (Route.RoutingKey) and further
	// headers. Router decides fields that are empty in a route. Optional.
	Routes map[string]outbox.Route
	// Router returns the route of a message and replaces Message.Route, which it can read. Several goroutines call it
	// at once. Default: Message.Route.
	Router func(outbox.Message) outbox.Route
	// Format is the form of messages. format.Symfony adds the headers that Symfony Messenger reads; those with a
	// namespace in their name are in holdfast-headers. format.CloudEvents makes CloudEvents. Default: this module's
	// own form.
	Format format.Format
	// Partitions maps the name of a topic to its number of partitions, at most 64. The subjects of shop are
	// shop.0.<message name>, shop.1.<message name> and so on. The partition of a message is the CRC-32 (IEEE) of its
	// key modulo their number; without a key, of its id. The consumers need the same number,
	// inboxnats.Stream.Partitions. Default: a topic is not split, the same as 1.
	Partitions map[string]int
	// Timeout bounds the wait for an acknowledgement, and each call of Ready and Check. Default: 5 s.
	Timeout time.Duration
}

// Publisher is a driver.Publisher on JetStream. It is safe for concurrent use and needs no closing. It does not close
// the connection.
type Publisher struct {
	conn  *nats.Conn
	js    jetstream.JetStream
	cfg   Config
	rules stored.Rules
	form  wire.Form
	room  chan struct{} // one slot per message in flight

	mu      sync.Mutex
	waiting map[*nats.Msg]*item
}

// item is a message in flight.
type item struct {
	ctx  context.Context // nobody waits for the message after its end
	stop func() bool     // ends the watch over ctx
	done func(error)
}

// NewPublisher returns a Publisher on a connection, which must reconnect forever: set nats.MaxReconnects(-1). The
// error lists every wrong field of cfg. NewPublisher does not contact a server.
func NewPublisher(conn *nats.Conn, cfg Config) (*Publisher, error) {
	cfg.Topic = cmp.Or(cfg.Topic, defaultTopic)
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	cfg.Partitions = maps.Clone(cfg.Partitions) // read while messages are sent
	var errs []error
	if conn == nil {
		errs = append(errs, errors.New("outboxnats: conn is nil"))
	}
	if !validSubject(cfg.Topic) {
		errs = append(errs, fmt.Errorf("outboxnats: Config.Topic %q is no subject", cfg.Topic))
	}
	for _, topic := range slices.Sorted(maps.Keys(cfg.Partitions)) {
		if err := partition.Check(cfg.Partitions[topic]); err != nil {
			errs = append(errs, fmt.Errorf("outboxnats: Config.Partitions of %q: %w", topic, err))
		}
	}
	formed, err := wire.NewForm(cfg.Format)
	if err != nil {
		errs = append(errs, fmt.Errorf("outboxnats: Config.Format: %w", err))
	}
	if cfg.Timeout < 0 {
		errs = append(errs, fmt.Errorf("outboxnats: Config.Timeout is %v, want more than 0", cfg.Timeout))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	p := &Publisher{
		conn: conn, cfg: cfg, form: formed, room: make(chan struct{}, window), waiting: map[*nats.Msg]*item{},
		rules: stored.Rules{ByName: cfg.Routes, Router: cfg.Router, Exchange: cfg.Topic},
	}
	p.js, err = jetstream.New(conn,
		jetstream.WithPublishAsyncTimeout(cfg.Timeout),
		jetstream.WithPublishAsyncMaxPending(2*window), // abandoned messages count as well
		jetstream.WithPublishAsyncAckHandler(func(_ jetstream.JetStream, m *nats.Msg, _ *jetstream.PubAck) { p.finish(m, nil) }),
		jetstream.WithPublishAsyncErrHandler(func(_ jetstream.JetStream, m *nats.Msg, err error) { p.finish(m, err) }))
	if err != nil {
		return nil, fmt.Errorf("outboxnats: %w", err)
	}
	return p, nil
}

// validSubject reports whether a message can be published on a subject.
func validSubject(subject string) bool {
	for token := range strings.SplitSeq(subject, ".") {
		if token == "" || token == "*" || token == ">" || strings.ContainsAny(token, " \t\r\n") {
			return false
		}
	}
	return true
}

// Publish implements driver.Publisher. The class of an error is Permanent for a message that can never be sent, such
// as one over the server's max_payload; Unroutable if no stream takes the subject or the user may not publish to it;
// Retryable if the stream rejects the message; Blocked if the server has no room; otherwise Unavailable. Without a
// connection it fails at once, and the client keeps nothing.
func (p *Publisher) Publish(ctx context.Context, m driver.Message, done func(error)) {
	msg, err := p.encode(m)
	if err != nil {
		done(&driver.PublishError{Class: driver.Permanent, Err: err})
		return
	}
	if !p.conn.IsConnected() {
		done(&driver.PublishError{Class: driver.Unavailable, Err: nats.ErrDisconnected})
		return
	}
	select {
	case p.room <- struct{}{}:
	case <-ctx.Done():
		done(&driver.PublishError{Class: driver.Unavailable, Err: ctx.Err()})
		return
	}
	it := &item{ctx: ctx, done: done}
	p.mu.Lock()
	it.stop = context.AfterFunc(ctx, func() { p.finish(msg, ctx.Err()) })
	p.waiting[msg] = it
	p.mu.Unlock()
	if _, err := p.js.PublishMsgAsync(msg); err != nil {
		p.finish(msg, err)
	}
}

// finish reports the outcome of a message, once.
func (p *Publisher) finish(msg *nats.Msg, err error) {
	p.mu.Lock()
	it := p.waiting[msg]
	delete(p.waiting, msg)
	p.mu.Unlock()
	if it == nil {
		return
	}
	it.stop()
	if errors.Is(err, jetstream.ErrNoStreamResponse) {
		go p.unanswered(msg.Subject, it) // it asks the server, which the client's own goroutine must not do
		return
	}
	<-p.room
	it.done(classify(err, p.denied(msg.Subject)))
}

// unanswered distinguishes a subject without a stream from a stream without a leader and a server without JetStream.
func (p *Publisher) unanswered(subject string, it *item) {
	ctx, cancel := context.WithTimeout(it.ctx, p.cfg.Timeout)
	defer cancel()
	class := driver.Unavailable
	_, err := p.js.StreamNameBySubject(ctx, subject)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		class = driver.Unroutable
	}
	<-p.room
	it.done(&driver.PublishError{Class: class, Err: fmt.Errorf("no stream answers on subject %q: %w", subject, errors.Join(jetstream.ErrNoStreamResponse, err))})
}

// denied reports whether the connection's last error denies this user the subject. The server gives no other answer
// to such a message.
func (p *Publisher) denied(subject string) bool {
	err := p.conn.LastError()
	return errors.Is(err, nats.ErrPermissionViolation) && strings.Contains(err.Error(), `"`+subject+`"`)
}

// classes maps error codes of JetStream to classes. All other codes are Retryable.
var classes = map[jetstream.ErrorCode]driver.Class{
	10054: driver.Permanent,   // larger than the stream takes
	10097: driver.Permanent,   // headers over 64 KiB
	10023: driver.Blocked,     // insufficient resources
	10028: driver.Blocked,     // resource limits of the account
	10047: driver.Blocked,     // insufficient storage
	10008: driver.Unavailable, // JetStream is not available
	10039: driver.Unavailable, // not enabled for the account
	10076: driver.Unavailable, // not enabled
}

// classify maps the outcome of a message to the errors of Publisher. An error that is not an answer of JetStream is a
// network fault.
func classify(err error, denied bool) error {
	class := driver.Unavailable
	if err == nil {
		return nil
	}
	if answer, ok := errors.AsType[jetstream.JetStreamError](err); ok && answer.APIError() != nil {
		class = cmp.Or(classes[answer.APIError().ErrorCode], driver.Retryable)
	}
	switch {
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrBadSubject), errors.Is(err, nats.ErrBadHeaderMsg):
		class = driver.Permanent
	case errors.Is(err, jetstream.ErrAsyncPublishTimeout) && denied:
		class, err = driver.Unroutable, fmt.Errorf("%w: %w", nats.ErrPermissionViolation, err)
	}
	return &driver.PublishError{Class: class, Err: err}
}

// encode returns the message in its form on the wire.
func (p *Publisher) encode(m driver.Message) (*nats.Msg, error) {
	route, id := p.rules.Route(m), m.ID.String()
	topic := route.Exchange
	if n := p.cfg.Partitions[topic]; n > 1 {
		topic = partition.Name(topic, partition.Of(m.Key, id, n))
	}
	msg := &nats.Msg{Subject: topic + "." + route.RoutingKey}
	if !validSubject(msg.Subject) {
		return nil, fmt.Errorf("%q is no subject", msg.Subject)
	}
	event := wire.Event{ID: m.ID, Name: m.Name, Key: m.Key, Time: m.CreatedAt}
	all, body, media, err := p.form.Encode(event, m.Body, m.ContentType, wire.EventPrefix, form.Sent, m.Headers, route.Headers)
	if err != nil {
		return nil, err
	}
	msg.Data = body
	all[form.Name] = m.Name
	if m.Key != "" {
		all[wire.HeaderKey] = m.Key
	}
	if media != wire.JSON || !p.form.Own() {
		all[form.ContentType] = media
	}
	if !m.CreatedAt.IsZero() && !wire.TimeInID(m.ID, m.CreatedAt) {
		all[form.CreatedAt] = m.CreatedAt.UTC().Format(time.RFC3339Nano)
	}
	msg.Header = form.Encode(all)
	msg.Header[nats.MsgIdHdr] = []string{id}
	return msg, nil
}

// Window returns the number of messages that await their acknowledgement, and the maximum. It implements
// driver.Windowed.
func (p *Publisher) Window() (used, size int) { return len(p.room), cap(p.room) }

// System implements driver.Identified.
func (*Publisher) System() string { return "nats" }
