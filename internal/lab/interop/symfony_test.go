//go:build interop

package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// each runs a test on each broker.
func each(t *testing.T, run func(t *testing.T, b broker)) {
	t.Run("RabbitMQ", func(t *testing.T) { run(t, newRabbit(t)) })
	t.Run("Redis", func(t *testing.T) { run(t, newRedis(t)) })
}

// Symfony handles messages of our publisher: with its class only, with a stamp of the application, and
// with the names and stamps of the library. A header of the user arrives, too.
func TestGoToSymfony(t *testing.T) {
	each(t, func(t *testing.T, b broker) {
		for name, form := range map[string]format.Symfony{"stock": {Classes: classes}, "stamp": stamped(), "library": format.Freyr02()} {
			t.Run(name, func(t *testing.T) {
				seen := b.tap(t, "orders")
				m := order("A-1")
				b.publish(t, form, m)
				serializer := "json"
				if name == "library" {
					serializer = "names"
				}
				events := php(t, b, task{"action": "consume", "serializer": serializer, "limit": 1, "seconds": 30})
				if len(of(events, "handled", "A-1")) != 1 {
					t.Fatalf("not handled: %+v", events)
				}
				got := of(events, "handling", "A-1")[0]
				if got.Class != classes[m.Name] || got.Total != 4200 {
					t.Errorf("handled %+v", got)
				}
				if b.kind() == "amqp" && (got.MessageID != m.ID.String() || got.Type != m.Name || got.Tenant != "go") {
					t.Errorf("properties %+v", got)
				}
				if (got.Stamp == m.ID.String()) != (form.IDStamp != "") || (got.Name == m.Name) != (form.NameStamp != "") {
					t.Errorf("stamps %+v", got)
				}
				first(t, seen).keep(t, b, "outbox", name, "what we publish, and Symfony handled: "+name, want{m.ID, m.Name, string(m.Body), m.ContentType})
			})
		}
	})
}

// serializers are Symfony's. Only PHP can write its own format.
var serializers = []string{"json", "php"}

// send makes Symfony write orders in a serializer's form, and returns them as our messages.
func send(t *testing.T, b broker, serializer string, orders ...string) (sent []outbox.Message) {
	t.Helper()
	var tasks []task
	for _, id := range orders {
		m := order(id)
		sent = append(sent, m)
		tasks = append(tasks, task{"orderId": id, "total": 4200, "id": m.ID, "stamp": appStamp})
	}
	if serializer == "php" {
		php(t, b, task{"action": "send", "serializer": serializer, "messages": tasks})
		return sent
	}
	sent[0].Key = "customer-7" // with a key, one header is a list
	b.publish(t, stamped(), sent...)
	return sent
}

// A handler of Symfony fails. Its delayed retries get the message with its id. So does its failure
// transport: Symfony retries the message from there, and our consumer can read it.
func TestSymfonyFails(t *testing.T) {
	for _, serializer := range serializers {
		t.Run(serializer, func(t *testing.T) { each(t, func(t *testing.T, b broker) { symfonyFails(t, b, serializer) }) })
	}
}

func symfonyFails(t *testing.T, b broker, serializer string) {
	sent := send(t, b, serializer, "fail-1", "fail-9")
	failed := make(received, 10)
	b.consume(t, "orders.failed", stamped(), failed.handle)
	seen := b.tap(t, "orders.failed")
	events := php(t, b, task{"action": "consume", "serializer": serializer, "limit": 2, "seconds": 60})
	for at, times := range []int{2, 3} {
		m, id := sent[at], []string{"fail-1", "fail-9"}[at]
		handling := of(events, "handling", id)
		if len(handling) != times {
			t.Errorf("%s was tried %d times, want %d", id, len(handling), times)
		}
		for i, e := range handling {
			if e.Retry != i || e.Stamp != m.ID.String() || b.kind() == "amqp" && serializer == "json" && (e.MessageID != m.ID.String() || e.Tenant != "go") {
				t.Errorf("attempt %d: %+v", i, e)
			}
		}
	}
	if len(of(events, "handled", "fail-1")) != 1 || len(of(events, "failed", "fail-9")) != 1 {
		t.Errorf("ends %+v", events)
	}
	hopeless := sent[1]
	if m := failed.next(t); m.ID != hopeless.ID || m.Name != hopeless.Name || string(m.Body) != string(hopeless.Body) {
		t.Errorf("in the failure transport: %+v", m)
	}
	first(t, seen).keep(t, b, "inbox", named("failed", serializer), "in Symfony's failure transport, after its retries: "+serializer,
		want{hopeless.ID, hopeless.Name, string(hopeless.Body), hopeless.ContentType})
	events = php(t, b, task{"action": "consume", "from": "orders.failed", "serializer": serializer, "limit": 1, "seconds": 30}, "MENDED=1")
	if len(of(events, "handled", "fail-9")) != 1 {
		t.Errorf("from the failure transport: %+v", events)
	}
}

// named returns the name of a fixture. The JSON serializer adds no suffix.
func named(name, serializer string) string {
	if serializer == "json" {
		return name
	}
	return name + "-" + serializer
}

// Our consumer handles messages of Symfony, also with a delay, and messages that Symfony sends again
// after a failure.
func TestSymfonyToGo(t *testing.T) {
	for name, tt := range map[string]struct {
		serializer, stamp string
		delay             time.Duration
		amqpOnly          bool // Symfony's entries on Redis have no properties
	}{
		"stamp":    {serializer: "json", stamp: appStamp},
		"library":  {serializer: "names", stamp: libraryStamp},
		"delayed":  {serializer: "json", stamp: appStamp, delay: time.Second},
		"property": {serializer: "json", amqpOnly: true},
		"php":      {serializer: "php", stamp: appStamp},
		"php-late": {serializer: "php", stamp: appStamp, delay: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, b broker) {
				if tt.amqpOnly && b.kind() != "amqp" {
					return
				}
				got := make(received, 10)
				b.consume(t, "orders", stamped(), got.handle)
				seen := b.tap(t, "orders")
				id := uuid.Must(uuid.NewV7())
				message := task{"orderId": name, "total": 4200, "id": id}
				if tt.stamp != "" {
					message["stamp"] = tt.stamp
				}
				if tt.delay > 0 {
					message["delay"] = tt.delay.Milliseconds()
				}
				begin := time.Now()
				php(t, b, task{"action": "send", "serializer": tt.serializer, "messages": []task{message}})
				if b.kind() == "redis" && tt.delay > 0 { // workers of PHP move due messages
					php(t, b, task{"action": "consume", "serializer": tt.serializer, "limit": 1, "seconds": 30})
				}
				m := got.next(t)
				body := `{"orderId":"` + name + `","total":4200}`
				if m.ID != id || m.Name != "order.placed" || string(m.Body) != body || m.ContentType != "application/json" {
					t.Errorf("received %+v", m)
				}
				if waited := time.Since(begin); waited < tt.delay {
					t.Errorf("after %v", waited)
				}
				first(t, seen).keep(t, b, "inbox", name, "from Symfony: "+name, want{id, "order.placed", body, "application/json"})
			})
		})
	}
}

// A message that Symfony has returned for a retry is the same message for us.
func TestSymfonyRetryToGo(t *testing.T) {
	for _, serializer := range serializers {
		t.Run(serializer, func(t *testing.T) { each(t, func(t *testing.T, b broker) { symfonyRetries(t, b, serializer) }) })
	}
}

func symfonyRetries(t *testing.T, b broker, serializer string) {
	m := send(t, b, serializer, "fail-1")[0]
	php(t, b, task{"action": "consume", "serializer": serializer, "limit": 1, "seconds": 30, "once": true})
	if b.kind() == "redis" { // workers of PHP move due messages, and then handle them
		php(t, b, task{"action": "consume", "serializer": serializer, "limit": 1, "seconds": 30})
	}
	f := last(t, func() []fixture { return b.waiting(t) })
	text, err := json.Marshal(f)
	if err != nil || !strings.Contains(string(text), "RedeliveryStamp") {
		t.Fatalf("the retry is %s, %v", text, err)
	}
	f.keep(t, b, "inbox", named("retried", serializer), "Symfony sends a failed message again: "+serializer,
		want{m.ID, m.Name, string(m.Body), m.ContentType})
	if b.kind() == "redis" {
		got := make(received, 10)
		b.consume(t, "orders", stamped(), got.handle)
		for range 2 {
			if r := got.next(t); r.ID != m.ID || r.Name != m.Name || string(r.Body) != string(m.Body) {
				t.Errorf("received %+v", r)
			}
		}
	}
}

// Symfony can read our dead letters.
func TestDeadLetterToSymfony(t *testing.T) {
	each(t, func(t *testing.T, b broker) {
		var tries atomic.Int64
		b.consume(t, "orders", stamped(), func(m *inbox.Message) error {
			if tries.Add(1) < 2 {
				return errors.New("broken for now")
			}
			return inbox.Unrecoverable(errors.New("broken"))
		})
		m := order("A-1")
		b.publish(t, stamped(), m)
		events := php(t, b, task{"action": "consume", "from": b.dead(), "serializer": "json", "limit": 1, "seconds": 30})
		if got := of(events, "handling", "A-1"); len(got) != 1 || got[0].Stamp != m.ID.String() || got[0].Class != classes[m.Name] {
			t.Errorf("PHP reads %+v", events)
		}
		if tries.Load() != 2 {
			t.Errorf("%d attempts", tries.Load())
		}
	})
}

// rabbit is a virtual host of RabbitMQ: exchanges orders and orders.failed, and queues for each side.
type rabbit struct{ *amqptest.Broker }

func newRabbit(t *testing.T) *rabbit {
	t.Helper()
	b := &rabbit{amqptest.New(t)}
	b.Exchange(t, "orders", "topic")
	b.Exchange(t, "orders.failed", "fanout")
	b.Queue(t, "orders.php", nil)
	b.Bind(t, "orders.php", "order.#", "orders")
	return b
}

func (b *rabbit) kind() string { return "amqp" }

func (b *rabbit) task() task { return task{"broker": "amqp", "dsn": b.URL} }

func (b *rabbit) dead() string { return "orders.go.failed.default" }

func (b *rabbit) publish(t *testing.T, form format.Symfony, msgs ...outbox.Message) {
	t.Helper()
	p, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{Exchange: "orders", Format: form})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = p.Run(ctx)
	}()
	defer func() {
		cancel()
		<-ended
	}()
	for _, m := range msgs {
		done := make(chan error, 1)
		p.Publish(ctx, m, func(err error) { done <- err })
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

func (b *rabbit) consume(t *testing.T, place string, form format.Symfony, handle func(*inbox.Message) error) {
	t.Helper()
	c, err := inboxamqp.NewConsumer(b.Dial, inboxamqp.Queue{Name: place + ".go", Bindings: []inboxamqp.Binding{{Exchange: place, Key: "#"}}, Classic: true, Format: form}, processor(handle), consumerConfig())
	if err != nil {
		t.Fatal(err)
	}
	start(t, c)
}

func (b *rabbit) tap(t *testing.T, place string) func() []fixture {
	t.Helper()
	queue := place + ".tap." + strings.ToLower(t.Name()[strings.LastIndexByte(t.Name(), '/')+1:])
	b.Queue(t, queue, nil)
	b.Bind(t, queue, "#", place)
	return func() []fixture { return b.take(t, queue) }
}

func (b *rabbit) waiting(t *testing.T) []fixture { return b.take(t, "orders.php") }

// take returns the messages in a queue, and leaves them there.
func (b *rabbit) take(t *testing.T, queue string) (seen []fixture) {
	t.Helper()
	ch := b.Channel(t)
	defer func() { _ = ch.Close() }() // requeues the messages
	for {
		d, found, err := ch.Get(queue, false)
		if err != nil {
			t.Fatal(err)
		}
		if !found {
			return seen
		}
		properties := map[string]any{}
		for name, value := range map[string]string{
			"message_id": d.MessageId, "type": d.Type, "content_type": d.ContentType, "content_encoding": d.ContentEncoding, "app_id": d.AppId,
			"correlation_id": d.CorrelationId, "reply_to": d.ReplyTo, "expiration": d.Expiration,
		} {
			if value != "" {
				properties[name] = value
			}
		}
		properties["delivery_mode"] = d.DeliveryMode
		if !d.Timestamp.IsZero() {
			properties["timestamp"] = d.Timestamp.Unix()
		}
		seen = append(seen, fixture{Properties: properties, Headers: plain(d.Headers).(map[string]any), Body: string(d.Body)})
	}
}

// plain converts a value to types that JSON has.
func plain(v any) any {
	switch v := v.(type) {
	case amqp.Table:
		all := map[string]any{}
		for name, value := range v {
			all[name] = plain(value)
		}
		return all
	case []any:
		all := make([]any, len(v))
		for i, value := range v {
			all[i] = plain(value)
		}
		return all
	case time.Time:
		return v.UTC().Format(time.RFC3339)
	}
	return v
}

// consumer is the common part of our consumers.
type consumer interface {
	Setup(ctx context.Context) error
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
}

func consumerConfig() inbox.ConsumerConfig {
	return inbox.ConsumerConfig{
		Name: "go", Logger: slog.New(slog.DiscardHandler), Concurrency: 1,
		Retry: inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 200 * time.Millisecond, Multiplier: 1, MaxDelay: 200 * time.Millisecond},
	}
}

// start runs a consumer until the test ends.
func start(t *testing.T, c consumer) {
	t.Helper()
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	testenv.Eventually(t, func() error { return c.Ready(ctx) })
}

// processor passes each message to a function.
type processor func(*inbox.Message) error

func (p processor) Process(_ context.Context, msgs []*inbox.Message) []error {
	errs := make([]error, len(msgs))
	for i, m := range msgs {
		errs[i] = p(m)
	}
	return errs
}

// redisServer is a database of Redis: streams orders and orders.failed, and a group for each side.
type redisServer struct{ client *redis.Client }

func newRedis(t *testing.T) *redisServer {
	t.Helper()
	return &redisServer{redistest.Client(t, redistest.URL(t))}
}

func (b *redisServer) kind() string { return "redis" }

func (b *redisServer) task() task {
	options := b.client.Options()
	return task{"broker": "redis", "dsn": "redis://" + options.Addr, "dbindex": options.DB}
}

func (b *redisServer) dead() string { return "{orders}:go:failed.unrecoverable" }

func (b *redisServer) publish(t *testing.T, form format.Symfony, msgs ...outbox.Message) {
	t.Helper()
	p, err := outboxredis.NewPublisher(b.client, outboxredis.Config{Stream: "orders", Format: form})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range msgs {
		done := make(chan error, 1)
		p.Publish(t.Context(), m, func(err error) { done <- err })
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

func (b *redisServer) consume(t *testing.T, place string, form format.Symfony, handle func(*inbox.Message) error) {
	t.Helper()
	c, err := inboxredis.NewConsumer(b.client, inboxredis.Stream{Name: place, KeepProcessed: true, Format: form}, processor(handle), consumerConfig())
	if err != nil {
		t.Fatal(err)
	}
	start(t, c)
}

func (b *redisServer) tap(t *testing.T, place string) func() []fixture {
	t.Helper()
	before := b.client.XLen(t.Context(), place).Val()
	return func() []fixture { return b.entries(t, place)[before:] }
}

func (b *redisServer) waiting(t *testing.T) []fixture { return b.entries(t, "orders") }

func (b *redisServer) entries(t *testing.T, stream string) (seen []fixture) {
	t.Helper()
	entries, err := b.client.XRange(t.Context(), stream, "-", "+").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		for _, value := range e.Values {
			if strings.ContainsRune(value.(string), '\uFFFD') {
				t.Fatal("a field is not UTF-8")
			}
		}
		seen = append(seen, fixture{Fields: e.Values})
	}
	return seen
}
