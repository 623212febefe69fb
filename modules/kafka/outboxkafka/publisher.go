package outboxkafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/holdfast-go/holdfast/internal/outbox/stored"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
)

// defaultTopic is the topic if none is configured.
const defaultTopic = "outbox"

// window is the largest number of unconfirmed messages: two batches of a relay. Publish waits for room.
const window = 1000

// The headers of a record besides the sender's.
const (
	headerID          = "holdfast-id"
	headerName        = "holdfast-name"
	headerCreatedAt   = "holdfast-created-at"
	headerContentType = "content-type"
)

// Config tunes a Publisher. The zero value works.
type Config struct {
	// Topic receives messages whose route names no exchange. Default: "outbox".
	Topic string
	// Routes maps message names to topic (Route.Exchange) and further headers. Router decides fields that are empty in
	// a route; Kafka does not use routing keys. Optional.
	Routes map[string]outbox.Route
	// Router returns the route of a message and replaces Message.Route, which it can read. Several goroutines call it at
	// once. Default: Message.Route.
	Router func(outbox.Message) outbox.Route
	// Format is the form of messages. format.CloudEvents makes CloudEvents, format.Symfony adds the headers by which
	// Symfony Messenger reads them. Default: this module's own form.
	Format format.Format
}

// Publisher is a driver.Publisher on Kafka. It is safe for concurrent use and needs no closing. It does not close the
// client.
type Publisher struct {
	client *kgo.Client
	cfg    Config
	rules  stored.Rules
	form   wire.Form
	room   chan struct{} // one slot per record in the client
	turn   chan struct{} // held while a message waits to be sent alone
}

// NewPublisher returns a Publisher that uses client. The client needs kgo.AllowIdempotentProduceCancellation: without
// it, a record that the relay has given up stays in the client and is sent late. The client must keep its defaults for
// acks and idempotence, and have no transactional id. Nothing is asked of a broker yet. The error names every violation.
func NewPublisher(client *kgo.Client, cfg Config) (*Publisher, error) {
	cfg.Topic = cmp.Or(cfg.Topic, defaultTopic)
	var errs []error
	if client == nil {
		errs = append(errs, errors.New("outboxkafka: client is nil"))
	} else {
		errs = append(errs, checkClient(client))
	}
	if !validTopic(cfg.Topic) {
		errs = append(errs, fmt.Errorf("outboxkafka: Config.Topic %q is not the name of a topic", cfg.Topic))
	}
	form, err := wire.NewForm(cfg.Format)
	if err != nil {
		errs = append(errs, fmt.Errorf("outboxkafka: Config.Format: %w", err))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Publisher{
		client: client, cfg: cfg, form: form, room: make(chan struct{}, window), turn: make(chan struct{}, 1),
		rules: stored.Rules{ByName: cfg.Routes, Router: cfg.Router, Exchange: cfg.Topic},
	}, nil
}

// checkClient returns an error for each option of the client that would break a promise.
func checkClient(client *kgo.Client) error {
	var errs []error
	refuse := func(bad bool, text string) {
		if bad {
			errs = append(errs, errors.New("outboxkafka: client: "+text))
		}
	}
	on := func(opt any) bool { return client.OptValue(opt) == true }
	refuse(client.OptValue(kgo.RequiredAcks) != any(kgo.AllISRAcks()), "set kgo.RequiredAcks(kgo.AllISRAcks())")
	refuse(on(kgo.DisableIdempotentWrite), "remove kgo.DisableIdempotentWrite")
	refuse(!on(kgo.AllowIdempotentProduceCancellation), "set kgo.AllowIdempotentProduceCancellation()")
	refuse(client.OptValue(kgo.TransactionalID) != "", "remove kgo.TransactionalID")
	refuse(on(kgo.ManualFlushing), "remove kgo.ManualFlushing")
	refuse(on(kgo.DefaultProduceTopicAlways), "remove kgo.DefaultProduceTopicAlways")
	partitioner, ok := client.OptValue(kgo.RecordPartitioner).(kgo.Partitioner)
	keyed := &kgo.Record{Topic: defaultTopic, Key: []byte("k")}
	refuse(ok && !partitioner.ForTopic(defaultTopic).RequiresConsistency(keyed), "set a kgo.RecordPartitioner that goes by the key")
	return errors.Join(errs...)
}

var topicName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

func validTopic(name string) bool { return topicName.MatchString(name) && name != "." && name != ".." }

// sending is a message without an outcome.
type sending struct {
	ctx      context.Context // nobody waits for the message after its end
	record   *kgo.Record
	done     func(error)
	answered atomic.Bool
	stop     func() bool // stops watching ctx
}

// answer reports the outcome, once.
func (s *sending) answer(err error) {
	if s.answered.CompareAndSwap(false, true) {
		s.done(err)
	}
}

// Publish implements driver.Publisher. The classes of its failures: Permanent if the message is too large or its topic's
// name is invalid; Unroutable if the topic does not exist or the user may not write to it; Retryable if the broker
// rejects the message for another reason; else Unavailable. Until ctx ends, the client retries the failures that pass,
// such as a partition without a leader.
func (p *Publisher) Publish(ctx context.Context, m driver.Message, done func(error)) {
	record, err := p.encode(m)
	if err != nil {
		done(&driver.PublishError{Class: driver.Permanent, Err: err})
		return
	}
	select {
	case p.room <- struct{}{}:
	case <-ctx.Done():
		done(unconfirmed(ctx))
		return
	}
	s := &sending{ctx: ctx, record: record, done: done}
	s.stop = context.AfterFunc(ctx, func() { s.answer(unconfirmed(ctx)) })
	p.client.Produce(ctx, record, func(_ *kgo.Record, err error) {
		<-p.room
		if err != nil && ofMessage(err) {
			go p.sendAlone(s) // the broker may have rejected the batch because of another message
			return
		}
		s.stop()
		s.answer(classify(err))
	})
}

// sendAlone sends a message again when no other message is in the client, so that the outcome is the message's own.
func (p *Publisher) sendAlone(s *sending) {
	defer s.stop()
	select {
	case p.turn <- struct{}{}:
	case <-s.ctx.Done():
		return // already answered
	}
	defer func() { <-p.turn }()
	taken := 0
	defer func() {
		for range taken {
			<-p.room
		}
	}()
	for ; taken < window; taken++ {
		select {
		case p.room <- struct{}{}:
		case <-s.ctx.Done():
			return
		}
	}
	s.answer(classify(p.client.ProduceSync(s.ctx, s.record).FirstErr()))
}

func unconfirmed(ctx context.Context) error {
	return &driver.PublishError{Class: driver.Unavailable, Err: fmt.Errorf("not confirmed: %w", context.Cause(ctx))}
}

// classes are the answers of brokers whose class does not follow from kerr.Error.Retriable.
var classes = map[*kerr.Error]driver.Class{
	kerr.MessageTooLarge:             driver.Permanent,
	kerr.RecordListTooLarge:          driver.Permanent,
	kerr.InvalidRecord:               driver.Permanent,
	kerr.UnsupportedForMessageFormat: driver.Permanent,
	kerr.UnknownTopicOrPartition:     driver.Unroutable,
	kerr.UnknownTopicID:              driver.Unroutable,
	kerr.InvalidTopicException:       driver.Unroutable,
	kerr.TopicAuthorizationFailed:    driver.Unroutable,
	kerr.CorruptMessage:              driver.Retryable,
	kerr.ClusterAuthorizationFailed:  driver.Unavailable,
	kerr.SaslAuthenticationFailed:    driver.Unavailable,
	kerr.UnsupportedSaslMechanism:    driver.Unavailable,
	kerr.IllegalSaslState:            driver.Unavailable,
	kerr.UnsupportedVersion:          driver.Unavailable,
}

// classOf returns the class of an error of the client. An error that no broker answered is a fault of the way there.
func classOf(err error) driver.Class {
	answer, ok := errors.AsType[*kerr.Error](err)
	if !ok || answer.Retriable && classes[answer] == "" {
		return driver.Unavailable
	}
	return cmp.Or(classes[answer], driver.Retryable)
}

// ofMessage reports whether an error concerns a message, not its topic or the way to the broker.
func ofMessage(err error) bool {
	class := classOf(err)
	return class == driver.Permanent || class == driver.Retryable
}

func classify(err error) error {
	if err == nil {
		return nil
	}
	return &driver.PublishError{Class: classOf(err), Err: err}
}

// encode returns the record of a message. It copies the body, because the client may hold a record after its outcome.
func (p *Publisher) encode(m driver.Message) (*kgo.Record, error) {
	route := p.rules.Route(m)
	if !validTopic(route.Exchange) {
		return nil, fmt.Errorf("%q is not the name of a topic", route.Exchange)
	}
	event := wire.Event{ID: m.ID, Name: m.Name, Key: m.Key, Time: m.CreatedAt}
	sent := func(name string) bool { return name != headerContentType && !wire.Own(name) }
	all, body, media, err := p.form.Encode(event, m.Body, m.ContentType, wire.EventFieldPrefix, sent, m.Headers, route.Headers)
	if err != nil {
		return nil, err
	}
	record := &kgo.Record{Topic: route.Exchange, Value: append([]byte{}, body...)} // without a value it would be a tombstone
	if m.Key != "" {
		record.Key = []byte(m.Key)
	}
	all[headerID], all[headerName] = m.ID.String(), m.Name
	if media != wire.JSON || !p.form.Own() {
		all[headerContentType] = media
	}
	if !m.CreatedAt.IsZero() && !wire.TimeInID(m.ID, m.CreatedAt) {
		all[headerCreatedAt] = m.CreatedAt.UTC().Format(time.RFC3339Nano)
	}
	record.Headers = make([]kgo.RecordHeader, 0, len(all))
	for _, name := range slices.Sorted(maps.Keys(all)) {
		record.Headers = append(record.Headers, kgo.RecordHeader{Key: name, Value: []byte(all[name])})
	}
	return record, nil
}

// Window returns the number of messages that await their confirm, and the maximum. It implements driver.Windowed.
func (p *Publisher) Window() (used, size int) { return len(p.room), cap(p.room) }

// System implements driver.Identified.
func (*Publisher) System() string { return "kafka" }
