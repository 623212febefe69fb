package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
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
	p.CorrelationId, p.ReplyTo, p.ContentEncoding = "call-7", "answers", "gzip"
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
	if m.CorrelationID != "call-7" || m.ReplyTo != "answers" || m.ContentEncoding != "gzip" {
		t.Errorf("message %+v, without a property of the sender", m)
	}
	want := map[string]string{"tenant": "a", "n": "7", "flag": "true", "when": "1970-01-01T00:00:01Z", "raw": "text", "f": "1.5", "holdfast-tenant": "b", "x-own": "broker"}
	if fmt.Sprint(m.Headers) != fmt.Sprint(want) {
		t.Errorf("headers %v, want %v", m.Headers, want)
	}
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
	if err := r.Ready(t.Context()); err == nil {
		t.Error("ready after Run")
	}
}

// A sender's headers may fill a frame, or may not be text. The dead letter must still contain the failure. It
// drops headers that leave no room for it, even those that look like ours.
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
		d := b.Take(t, "shop.failed.default", 1, testenv.Patience)[0]
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
	found := findings(t, c)
	want := "25 queues do not exist: orders, orders.failed.default, orders.retrying, orders.putoff, holdfast.lost, holdfast.delay.100, "
	if len(found) != 3 || !strings.Contains(found[0].Error(), want) {
		t.Fatalf("findings %v, want %q and two exchanges", found, want)
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

// An existing exchange is used as it is, whatever its type.
func TestSetupKeepsExchanges(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "direct")
	c := newConsumer(t, b.Dial, &recorder{}, config{Bindings: []inboxamqp.Binding{{Exchange: "events", Key: "order.*"}}})
	setUp(t, c)
	b.Publish(t, "events", "order.*", order())
	awaitDepth(t, b, "orders", 1)
}

// If several processes set up different topologies at the same time, one wins and the others use its topology.
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
	queue, cfg := config{
		Queue: "holdfast.x", Concurrency: 10, Prefetch: 5, MessageLimit: -1, TimeLimit: -1, Classes: []string{"No!"},
		Bindings: []inboxamqp.Binding{{}}, Retry: inbox.RetryPolicy{Jitter: 2},
		Batch: -1, MaxCrashes: -1, HandlerTimeout: -1, Timeout: -1,
	}.public()
	_, err := inboxamqp.NewConsumer(nil, queue, nil, cfg)
	for _, want := range []string{
		"dial", "processor", "queue ", "Prefetch", "MessageLimit", "TimeLimit", "Classes", "Bindings[0]", "Jitter",
		"Batch", "MaxCrashes", "HandlerTimeout", ": Timeout -",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not name %s", err, want)
		}
	}
}

// fixable is a finding of Check.
type fixable interface {
	error
	Fix() string
}

// findings returns the findings of Check.
func findings(t *testing.T, c *inboxamqp.Consumer) (all []fixable) {
	t.Helper()
	err := c.Check(t.Context())
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("Check returned %T: %v", err, err)
	}
	for _, one := range joined.Unwrap() {
		found, ok := one.(fixable)
		if !ok || found.Fix() == "" {
			t.Fatalf("nothing to fix: %v", one)
		}
		all = append(all, found)
	}
	return all
}

// afterSetup returns a consumer whose topology exists.
func afterSetup(t *testing.T, b *amqptest.Broker, cfg config) *inboxamqp.Consumer {
	t.Helper()
	c := newConsumer(t, b.Dial, &recorder{}, cfg)
	setUp(t, c)
	return c
}

func TestCheckTimes(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	const day = 24 * time.Hour
	for name, tt := range map[string]struct {
		cfg  config
		want string // in the only finding; empty for none
	}{
		"default":               {cfg: config{}},
		"default retention":     {cfg: config{Retention: driver.DefaultRetention}},
		"default batches":       {cfg: config{Batch: 100}},
		"retention too short":   {config{Retention: day}, "takes effect again"},
		"retries for too long":  {config{Retention: 8 * day, Retry: inbox.RetryPolicy{MaxAge: 5 * day}}, "takes effect again"},
		"nothing is remembered": {cfg: config{Retry: inbox.RetryPolicy{MaxAge: 5 * day}}},
		"prefetch too large":    {config{HandlerTimeout: 15 * time.Minute}, "16 prefetched messages, 8 at once in up to 15m0s, may take longer than the 30m0s"},
		"batches count, too":    {config{Concurrency: 1, Batch: 100, Prefetch: 500}, "500 prefetched messages, 100 at once in up to 10m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := findings(t, afterSetup(t, b, tt.cfg))
			switch {
			case tt.want == "" && len(got) != 0:
				t.Errorf("findings %v", got)
			case tt.want != "" && (len(got) != 1 || !strings.Contains(got[0].Error(), tt.want)):
				t.Errorf("findings %v, want one with %q", got, tt.want)
			}
		})
	}
}

// checked is a processor with a finding.
type checked struct{ recorder }

func (*checked) Check(context.Context) error { return errors.Join(errBroken, errBroken) }

// Check calls the processor's Check, too, and reports a broker that is down.
func TestCheckAsksTheProcessor(t *testing.T) {
	t.Parallel()
	down := func(context.Context) (*amqp.Connection, error) { return nil, context.DeadlineExceeded }
	c := newConsumer(t, down, &checked{}, config{})
	if err := c.Check(t.Context()); !errors.Is(err, errBroken) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Check returned %v", err)
	}
}

// Retries and the dead letter keep the sender's AMQP properties. They drop properties that would lose the copy or
// that readers would mistake for the broker's.
func TestRetries(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	got := recorder{fail: func(*inbox.Message) error { return errBroken }}
	consume(t, b, &got, config{Queue: "orders", Retry: quick})
	p := order()
	p.Headers = amqp.Table{"tenant": "a", "x-death": "mine", "x-delivery-zone": "north", "x-acquired-by": "web", "x-opt-in": "yes"}
	p.Expiration = "60000"
	b.Publish(t, "", "orders", p)
	dead := b.Take(t, "orders.failed.default", 1, testenv.Patience)[0]
	if n := len(got.messages()); n != 4 {
		t.Errorf("%d tries, want 4", n)
	}
	for name, want := range map[string]any{"x-delivery-zone": "north", "x-acquired-by": "web", "x-opt-in": "yes"} {
		if last := got.messages()[3].Headers[name]; dead.Headers[name] != want || last != want {
			t.Errorf("header %s is %q for the last try and %v of the dead letter", name, last, dead.Headers[name])
		}
	}
	if dead.Headers["holdfast-attempt"] != "4" || dead.Headers["holdfast-error"] != "broken" || dead.Headers["tenant"] != "a" ||
		dead.MessageId != p.MessageId || dead.Type != p.Type || !dead.Timestamp.Equal(p.Timestamp) || dead.Expiration != "" {
		t.Errorf("dead letter %+v", dead)
	}
	first, err1 := time.Parse(time.RFC3339Nano, dead.Headers["holdfast-first-failed-at"].(string))
	final, err2 := time.Parse(time.RFC3339Nano, dead.Headers["holdfast-last-failed-at"].(string))
	if err := errors.Join(err1, err2); err != nil || !final.After(first) {
		t.Errorf("first failure %v, last %v: %v", first, final, err)
	}
}

// Dead letters that were moved back without DeadLetters start at attempt 1 again.
func TestDeadLetter_movedByShovelStartsAgain(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	ledger := memory.NewLedger()
	var failing atomic.Bool
	failing.Store(true)
	got := recorder{fail: failWhile(&failing, errBroken)}
	r := consume(t, b, &got, config{Queue: "orders", Retry: inbox.RetryPolicy{MaxAttempts: 2, BaseDelay: 50 * time.Millisecond}, Ledger: ledger})
	b.Publish(t, "", "orders", order())
	dead := b.Take(t, "orders.failed.default", 1, testenv.Patience)[0]
	before := len(got.messages())
	b.Publish(t, "", "orders", amqp.Publishing{
		Headers: dead.Headers, MessageId: dead.MessageId, Type: dead.Type, ContentType: dead.ContentType, DeliveryMode: 2, Body: dead.Body,
	})
	for i, m := range got.await(t, before+2)[before:] {
		if m.Attempt != i+1 || m.Replays != 1 {
			t.Errorf("delivery %d: attempt %d, replays %d", i, m.Attempt, m.Replays)
		}
	}
	again := b.Take(t, "orders.failed.default", 1, testenv.Patience)[0]
	if again.Headers["holdfast-attempt"] != "2" || again.Headers["holdfast-replays"] != "1" {
		t.Errorf("headers %v", again.Headers)
	}
	r.stop(t)
}
