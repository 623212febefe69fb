package inboxamqp_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestConsume(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "topic")
	var got recorder
	r := consume(t, b, &got, config{
		Queue: "orders", Retry: quick,
		Bindings: []inboxamqp.Binding{{Exchange: "events", Key: "order.*"}},
	})
	p := order()
	p.Headers = amqp.Table{
		"tenant": "a", "n": int32(7), "deep": amqp.Table{"a": "b"}, "list": []any{"a"},
		"flag": true, "when": time.Unix(1, 0), "raw": []byte("text"), "none": nil, "x-own": "broker", "f": 1.5,
		"holdfast-tenant": "b", "holdfast-attempt": "1", "holdfast-first-failed-at": "9999-01-01T00:00:00Z",
	}
	b.Publish(t, "events", "order.placed", p)
	m := got.await(t, 1)[0]
	if m.ID.String() != p.MessageId || m.Name != "order.placed" || string(m.Body) != `{"n":1}` || m.Attempt != 1 ||
		m.Queue != "orders" || m.ContentType != "application/json" || !m.PublishedAt.Equal(p.Timestamp) || !m.FirstFailedAt.IsZero() {
		t.Errorf("message %+v", m)
	}
	want := map[string]string{"tenant": "a", "n": "7", "flag": "true", "when": "1970-01-01T00:00:01Z", "raw": "text", "f": "1.5", "holdfast-tenant": "b"}
	if fmt.Sprint(m.Headers) != fmt.Sprint(want) {
		t.Errorf("headers %v, want %v", m.Headers, want)
	}
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
	if err := r.Ready(t.Context()); err == nil {
		t.Error("ready after Run")
	}
}

// A sender's headers may fill a frame, or be no text. The dead letter has the failure all the same, and drops
// the headers that leave no room for it, also those that look like ours.
func TestDeadLetter_headersOfSenderFillTheFrame(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	got := &recorder{fail: func(*inbox.Message) error { return inbox.Invalid(errBroken) }}
	consume(t, b, got, config{DeadLetterPrefix: "shop.", Name: "billing"})
	const frame = 128 << 10
	attributes := amqp.Table{}
	for _, prefix := range []string{"cloudEvents:", "cloudEvents_"} {
		for _, name := range []string{"specversion", "id", "source", "type", "partitionkey"} {
			attributes[prefix+name] = strings.Repeat("h", 8000)
		}
	}
	tables := map[string]amqp.Table{
		"attributes of an event": attributes,
		"deep header":            {"type": amqp.Table{"a": []any{int64(1)}}},
		"our headers":            {"holdfast-origin-exchange": strings.Repeat("h", 100<<10), "holdfast-recovered": amqp.Table{"a": strings.Repeat("h", 8<<10)}},
	}
	for _, name := range []string{"holdfast-junk", "holdfast-history", "holdfast-fingerprint", "holdfast-key", "foreign", "Content-Type"} {
		tables[name] = amqp.Table{name: strings.Repeat("h", frame-300)} // fits until we add ours
	}
	for name, headers := range tables {
		p := order()
		p.Headers = headers
		b.Publish(t, "", "orders", p)
		d := b.Take(t, "shop.failed.validation", 1, testenv.Patience)[0]
		if d.MessageId != p.MessageId || string(d.Body) != string(p.Body) || d.Headers["holdfast-error"] == "" || d.Headers["holdfast-attempt"] != "1" ||
			d.Headers["holdfast-failure-class"] != "validation" || d.Headers["holdfast-consumer"] != "billing" || d.Headers["holdfast-origin-queue"] != "orders" ||
			d.Headers["holdfast-origin-routing-key"] != "orders" || d.DeliveryMode != amqp.Persistent {
			t.Errorf("%s: dead letter %.900v", name, d)
		}
		if text, _ := d.Headers[name].(string); len(text) > frame/2 {
			t.Errorf("%s: the dead letter keeps %d bytes of it", name, len(text))
		}
	}
	awaitDepth(t, b, "orders", 0)
}

func TestSetupAndCheck(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	c := newConsumer(t, b.Dial, &recorder{}, config{
		Queue: "orders", Retry: quick,
		Bindings: []inboxamqp.Binding{{Exchange: "events", Key: "order.*"}, {Exchange: "events", Key: "parcel.*"}},
	})
	// The queue, three steps of three with one shared bound and four classes; one exchange.
	queues := 1 + len(driver.Steps(quick)) + 4
	found := findings(t, c)
	if len(found) != 2 || !strings.Contains(found[0].Error(), fmt.Sprintf("%d queues do not exist: orders, orders.retry.", queues)) {
		t.Fatalf("want %d queues and an exchange: %v", queues, found)
	}
	for range 2 {
		setUp(t, c)
	}
	if found := findings(t, c); len(found) != 0 {
		t.Errorf("after Setup: %v", found)
	}
	b.Publish(t, "events", "order.placed", order())
	awaitDepth(t, b, "orders", 1)
}

// An exchange that exists is used as it is, whatever its type.
func TestSetupKeepsExchanges(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "direct")
	c := newConsumer(t, b.Dial, &recorder{}, config{Bindings: []inboxamqp.Binding{{Exchange: "events", Key: "order.*"}}})
	setUp(t, c)
	b.Publish(t, "events", "order.*", order())
	awaitDepth(t, b, "orders", 1)
}

// Processes that set up differently at the same time: one wins, and the others use what it declared.
func TestSetupRaces(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	results := make(chan error, 8)
	for i := range cap(results) {
		c := newConsumer(t, b.Dial, &recorder{}, config{Queue: "orders", Retry: quick, Classic: i%2 == 1})
		go func() { results <- c.Setup(context.Background()) }()
	}
	for range cap(results) {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	_, err := inboxamqp.NewConsumer(nil, "", nil, config{
		Concurrency: 10, Prefetch: 5, MessageLimit: -1, TimeLimit: -1, Classes: []string{"No!"},
		Bindings: []inboxamqp.Binding{{}}, Retry: inbox.RetryPolicy{Jitter: 2},
		Batch: -1, MaxCrashes: -1, HandlerTimeout: -1, Timeout: -1,
	}.public())
	for _, want := range []string{
		"dial", "processor", "queue ", "Prefetch", "MessageLimit", "TimeLimit", "Classes", "Bindings[0]", "Jitter",
		"Batch", "MaxCrashes", "HandlerTimeout", "Config.Timeout",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not name %s", err, want)
		}
	}
}
