package outboxredis

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/outbox/stored"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
)

// defaultStream is the stream if none is configured.
const defaultStream = "outbox"

// window is the largest number of unanswered messages: two batches of a relay. Publish waits for room.
const window = 1000

// Config tunes a Publisher. The zero value works.
type Config struct {
	// Stream receives messages whose route names no exchange. Default: "outbox".
	Stream string
	// Routes maps message names to stream (Route.Exchange) and further headers. Router decides fields that are
	// empty in a route; Redis does not use routing keys. Optional.
	Routes map[string]outbox.Route
	// Router returns the route of a message and replaces Message.Route, which it can read. Several goroutines call
	// it at once. Default: Message.Route.
	Router func(outbox.Message) outbox.Route
	// Format is the form of messages. format.Symfony puts body and headers into the field of Symfony Messenger's
	// transport, instead of the fields body and headers; such a body must be UTF-8. format.CloudEvents makes
	// CloudEvents. Default: this module's own form.
	Format format.Format
	// Partitions maps the name of a stream to its number of partitions, at most 64. The partitions of orders are
	// orders.0, orders.1 and so on. The partition of a message is the CRC-32 (IEEE) of its key modulo their
	// number; without a key, of its id. The consumers need the same number, inboxredis.Stream.Partitions. Default:
	// a stream is not split, the same as 1.
	Partitions map[string]int
	// MaxLen is the approximate number of entries that a stream, or each partition, keeps (MAXLEN ~). The oldest
	// are deleted, read or not. Default: all are kept.
	MaxLen int64
	// Timeout bounds one pipeline, and each call of Ready and Check. After that, a call of a client without the
	// option ContextTimeoutEnabled is abandoned, and ends by the client's own timeouts. Default: 5 s.
	Timeout time.Duration
}

// Publisher is a driver.Publisher on Redis Streams. It is safe for concurrent use and needs no closing; a
// goroutine runs only while messages are in flight. It does not close the client.
type Publisher struct {
	client redis.UniversalClient
	cfg    Config
	rules  stored.Rules
	form   wire.Form
	room   chan struct{} // one slot per message in flight

	mu      sync.Mutex
	queue   []item
	sending bool
}

// NewPublisher returns a Publisher that uses client.
func NewPublisher(client redis.UniversalClient, cfg Config) (*Publisher, error) {
	cfg.Stream = cmp.Or(cfg.Stream, defaultStream)
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	cfg.Partitions = maps.Clone(cfg.Partitions) // read while messages are sent
	var errs []error
	if client == nil {
		errs = append(errs, errors.New("outboxredis: NewPublisher needs a client"))
	}
	if cfg.MaxLen < 0 {
		errs = append(errs, fmt.Errorf("outboxredis: Config.MaxLen is %d, want 0 or more", cfg.MaxLen))
	}
	for _, stream := range slices.Sorted(maps.Keys(cfg.Partitions)) {
		if err := partition.Check(cfg.Partitions[stream]); err != nil {
			errs = append(errs, fmt.Errorf("outboxredis: Config.Partitions of %q: %w", stream, err))
		}
	}
	form, err := wire.NewForm(cfg.Format)
	if err != nil {
		errs = append(errs, fmt.Errorf("outboxredis: Config.Format: %w", err))
	}
	if cfg.Timeout < 0 {
		errs = append(errs, fmt.Errorf("outboxredis: Config.Timeout is %v, want more than 0", cfg.Timeout))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	rules := stored.Rules{ByName: cfg.Routes, Router: cfg.Router, Exchange: cfg.Stream}
	return &Publisher{client: client, cfg: cfg, rules: rules, form: form, room: make(chan struct{}, window)}, nil
}

// Publish implements driver.Publisher.
func (p *Publisher) Publish(ctx context.Context, m driver.Message, done func(error)) {
	args, err := p.entry(m)
	if err != nil {
		done(&driver.PublishError{Class: driver.Permanent, Err: err})
		return
	}
	select {
	case p.room <- struct{}{}:
	case <-ctx.Done():
		done(&driver.PublishError{Class: driver.Unavailable, Err: ctx.Err()})
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = append(p.queue, item{ctx: ctx, args: args, size: len(m.Body), done: done})
	if !p.sending {
		p.sending = true
		go p.send()
	}
}

func (p *Publisher) entry(m driver.Message) (*redis.XAddArgs, error) {
	m.ContentType = cmp.Or(m.ContentType, "application/json")
	route := p.rules.Route(m)
	headers := make(map[string]string, len(m.Headers)+len(route.Headers))
	maps.Copy(headers, m.Headers)
	maps.Copy(headers, route.Headers)
	content, err := p.content(m, headers)
	if err != nil {
		return nil, err
	}
	stream, id := route.Exchange, m.ID.String()
	if n := p.cfg.Partitions[stream]; n > 1 {
		stream = partition.Name(stream, partition.Of(m.Key, id, n))
	}
	return &redis.XAddArgs{Stream: stream, MaxLen: p.cfg.MaxLen, Approx: p.cfg.MaxLen > 0, Values: append([]any{
		"id", id, "name", m.Name, "key", m.Key,
		"created-at", m.CreatedAt.UTC().Format(time.RFC3339Nano),
	}, content...)}, nil
}

// content returns the fields with headers and body.
func (p *Publisher) content(m driver.Message, headers map[string]string) ([]any, error) {
	if !p.form.Symfony.On() {
		text, err := json.Marshal(headers)
		if err != nil {
			return nil, fmt.Errorf("encode headers: %w", err)
		}
		return p.event(m, headers, []any{"headers", text})
	}
	if !utf8.Valid(m.Body) {
		return nil, errors.New("the body is not UTF-8: Symfony's transport has it in JSON")
	}
	p.form.Symfony.Headers(m.ID, m.Name, func(name, value string) { headers[name] = value })
	text, err := json.Marshal(map[string]any{"body": string(m.Body), "headers": headers})
	if err != nil {
		return nil, fmt.Errorf("encode message: %w", err)
	}
	return []any{"content-type", m.ContentType, "message", text}, nil
}

// event adds content type and body to the fields, or makes a CloudEvent of them.
func (p *Publisher) event(m driver.Message, headers map[string]string, fields []any) ([]any, error) {
	if p.form.Events == nil {
		return append(fields, "content-type", m.ContentType, "body", m.Body), nil
	}
	attributes := p.form.Events.Attributes(wire.Event{ID: m.ID, Name: m.Name, Key: m.Key, Time: m.CreatedAt}, headers)
	if p.form.Events.Structured() {
		body, structured, err := wire.Envelope(attributes, m.ContentType, m.Body)
		return append(fields, "content-type", structured, "body", body), err
	}
	for _, name := range slices.Sorted(maps.Keys(attributes)) {
		fields = append(fields, wire.EventFieldPrefix+name, attributes[name])
	}
	return append(fields, "content-type", m.ContentType, "body", m.Body), nil
}

// Ready returns nil if Redis answers within Config.Timeout.
func (p *Publisher) Ready(ctx context.Context) error {
	_, err := redisconn.Within(ctx, p.cfg.Timeout, func(ctx context.Context) (string, error) { return p.client.Ping(ctx).Result() })
	if err != nil {
		return fmt.Errorf("outboxredis: %w", err)
	}
	return nil
}

// Window returns the number of messages that await their reply, and the maximum. It implements driver.Windowed.
func (p *Publisher) Window() (used, size int) { return len(p.room), cap(p.room) }

// System implements driver.Identified.
func (*Publisher) System() string { return "redis" }

// Check checks the streams named by Config.Stream, Config.Routes and Config.Partitions, and the eviction policy if
// the server reports it. It returns nil if it finds nothing. Otherwise the error joins the findings, each with a
// method Fix() string, and the errors of checks that failed.
func (p *Publisher) Check(ctx context.Context) error {
	found := check.Findings{Component: "outboxredis"}
	for _, stream := range p.streams() {
		kind, err := redisconn.Within(ctx, p.cfg.Timeout, func(ctx context.Context) (string, error) { return p.client.Type(ctx, stream).Result() })
		if err != nil {
			found.Join(fmt.Errorf("outboxredis: check: %w", err))
			return found.Err()
		}
		if kind != "stream" && kind != "none" {
			found.Add("configure another stream, or remove the key", "key %q is a %s, not a stream", stream, kind)
		}
	}
	config, err := redisconn.Within(ctx, p.cfg.Timeout, func(ctx context.Context) (map[string]string, error) {
		return p.client.ConfigGet(ctx, "maxmemory-policy").Result()
	})
	// A managed server may refuse. Any other error means that the check failed.
	if _, refused := errors.AsType[redis.Error](err); err != nil && !refused {
		found.Join(fmt.Errorf("outboxredis: check: %w", err))
	}
	if policy := config["maxmemory-policy"]; strings.HasPrefix(policy, "allkeys-") {
		found.Add("CONFIG SET maxmemory-policy noeviction", "maxmemory-policy %s may evict whole streams", policy)
	}
	return found.Err()
}

// streams returns the streams that are known before the first message.
func (p *Publisher) streams() []string {
	names := []string{p.cfg.Stream}
	for _, route := range p.cfg.Routes {
		if route.Exchange != "" {
			names = append(names, route.Exchange)
		}
	}
	names = slices.AppendSeq(names, maps.Keys(p.cfg.Partitions))
	slices.Sort(names)
	var all []string
	for _, name := range slices.Compact(names) {
		all = append(all, partition.Names(name, p.cfg.Partitions[name])...)
	}
	return all
}
