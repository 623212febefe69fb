package inboxamqp_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
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

func TestPoison(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	mux := inbox.NewMux()
	var good atomic.Int64
	must(t, inbox.Handle(mux, "order.placed", func(context.Context, struct{ N int }) error { good.Add(1); return nil }))
	r := consume(t, b, mux, config{Queue: "orders", Retry: quick, DeadLetterPrefix: "shop.", MaxBodyBytes: 1000, Name: "billing"})
	poison := map[string]func(*amqp.Publishing){
		"no id":        func(p *amqp.Publishing) { p.MessageId = "" },
		"id of v4":     func(p *amqp.Publishing) { p.MessageId = "0f8fad5b-d9cb-469f-a165-70867728950e" },
		"no name":      func(p *amqp.Publishing) { p.Type = "" },
		"unknown name": func(p *amqp.Publishing) { p.Type = "order.unknown" },
		"no JSON":      func(p *amqp.Publishing) { p.Body = []byte("{") },
		"huge":         func(p *amqp.Publishing) { p.Body = []byte(`{"n":1,"x":"` + strings.Repeat("x", 1000) + `"}`) },
		"deep header": func(p *amqp.Publishing) {
			p.Type = ""
			p.Headers = amqp.Table{"type": amqp.Table{"a": []any{int64(1)}}}
		},
		"full attributes of an event": func(p *amqp.Publishing) {
			p.Body = nil
			p.Headers = amqp.Table{}
			for _, prefix := range []string{"cloudEvents:", "cloudEvents_"} {
				for _, name := range []string{"specversion", "id", "source", "type", "partitionkey"} {
					p.Headers[prefix+name] = strings.Repeat("h", 8000)
				}
			}
		},
		"our headers full": func(p *amqp.Publishing) {
			p.Body = nil
			p.Headers = amqp.Table{
				"holdfast-origin-exchange": strings.Repeat("h", 100<<10), "holdfast-recovered": amqp.Table{"a": strings.Repeat("h", 8<<10)},
			}
		},
	}
	bad := int64(len(poison))
	for name, spoil := range poison {
		p := order()
		p.CorrelationId = name
		spoil(&p)
		b.Publish(t, "", "orders", p)
		b.Publish(t, "", "orders", order())
	}
	for _, d := range b.Take(t, "shop.failed.validation", len(poison), patience) {
		for header, want := range map[string]any{
			"holdfast-failure-class": "validation", "holdfast-attempt": "1", "holdfast-consumer": "billing",
			"holdfast-origin-queue": "orders", "holdfast-origin-routing-key": "orders",
		} {
			if d.Headers[header] != want {
				t.Errorf("%s: header %s is %v, want %v", d.CorrelationId, header, d.Headers[header], want)
			}
		}
		if d.Headers["holdfast-error"] == "" || d.Headers["holdfast-last-failed-at"] == "" || d.DeliveryMode != amqp.Persistent {
			t.Errorf("%s: %+v", d.CorrelationId, d)
		}
		delete(poison, d.CorrelationId)
	}
	if len(poison) != 0 {
		t.Errorf("not among the dead letters: %v", poison)
	}
	testenv.Eventually(t, func() error {
		if good.Load() != bad {
			return fmt.Errorf("%d good messages processed, want %d", good.Load(), bad)
		}
		return nil
	})
	r.stop(t)
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
