package inboxamqp_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

const symfonyID = "018f8fad-5bd9-7b46-8f16-570867728950"

func amqpTable(m map[string]any) amqp.Table {
	table := amqp.Table{}
	for name, value := range m {
		table[name] = amqpValue(value)
	}
	return table
}

func amqpValue(v any) any {
	switch v := v.(type) {
	case float64:
		return int64(v)
	case map[string]any:
		return amqpTable(v)
	case []any:
		list := make([]any, len(v))
		for i, item := range v {
			list[i] = amqpValue(item)
		}
		return list
	}
	return v
}

// symfonyReads decodes a message like Messenger's serializer, and returns the type and the ids of its stamps.
func symfonyReads(t *testing.T, d amqp.Delivery) (class string, ids []string) {
	t.Helper()
	class, _ = d.Headers["type"].(string)
	if len(d.Body) == 0 || class == "" {
		t.Errorf("no body or no header type: %+v", d)
	}
	for name, value := range d.Headers {
		stamp, ok := strings.CutPrefix(name, "X-Message-Stamp-")
		if !ok {
			continue
		}
		var stamps []map[string]any
		if text, _ := value.(string); json.Unmarshal([]byte(text), &stamps) != nil {
			t.Errorf("stamp %s cannot be decoded: %v", stamp, value)
		}
		for _, s := range stamps {
			if id, ok := s["messageId"].(string); ok {
				ids = append(ids, id)
			}
		}
	}
	return class, ids
}

// Symfony and our own inbox must read messages that our outbox writes in the Symfony form.
func TestToSymfony(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "topic")
	b.Queue(t, "php", nil)
	b.Bind(t, "php", "order.*", "events")
	form := format.Symfony{Classes: map[string]string{"order.placed": `App\OrderPlaced`}, IDStamp: `App\Uid`}
	var got recorder
	consume(t, b, &got, config{Queue: "go", Format: form, Retry: quick, Bindings: []inboxamqp.Binding{{Exchange: "events", Key: "order.*"}}})
	m := driver.Message{
		ID: uuid.MustParse(symfonyID), Name: "order.placed", Body: []byte(`{"orderId":"A-1","total":4200}`), CreatedAt: time.Now(),
	}
	publishOne(t, b, outboxamqp.Config{Exchange: "events", Format: form}, m)
	raw := b.Take(t, "php", 1, testenv.Patience)[0]
	class, ids := symfonyReads(t, raw)
	if class != `App\OrderPlaced` || len(ids) != 1 || ids[0] != symfonyID || raw.ContentType != "application/json" {
		t.Errorf("Symfony reads %s, %v: %+v", class, ids, raw)
	}
	if own := got.await(t, 1)[0]; own.ID != m.ID || own.Name != m.Name || string(own.Body) != string(m.Body) {
		t.Errorf("we read %+v", own)
	}
	// A message from PHP has neither property.
	b.Publish(t, "", "go", amqp.Publishing{Headers: raw.Headers, Body: raw.Body})
	if own := got.await(t, 2)[1]; own.ID != m.ID || own.Name != m.Name {
		t.Errorf("we read %+v", own)
	}
	// An operator finds dead letters by the message name.
	b.Publish(t, "", "go.failed.default", amqp.Publishing{Headers: raw.Headers, Body: raw.Body})
	letters, err := newDeadLetters(t, b, config{Queue: "go", Format: form}).List(t.Context(), inbox.Filter{Name: m.Name, Whole: true})
	if err != nil || len(letters) != 1 || letters[0].Message.ID != m.ID {
		t.Errorf("dead letters %+v, %v", letters, err)
	}
}

// recorded is a message of a real Symfony Messenger, recorded by `make interop RECORD=1`.
type recorded struct {
	About      string
	Properties struct {
		MessageID   string `json:"message_id"`
		Type        string
		ContentType string `json:"content_type"`
		Timestamp   int64
	}
	Headers map[string]any
	Body    string
	Want    struct {
		ID          uuid.UUID
		Name, Body  string
		ContentType string `json:"content_type"`
	}
}

// We must read messages that a real Symfony sent, retried or gave up: with its class, with the name and the stamps
// of freyr/message-broker, after its retries and from its failure transport. Symfony must be able to read our
// copies of them, after retries and as dead letters.
func TestRecorded(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	form := format.Symfony{Classes: map[string]string{"order.placed": `App\Message\OrderPlaced`}, IDStamp: `App\Messenger\MessageIdStamp`}
	got := recorder{fail: func(m *inbox.Message) error {
		if m.Attempt < 2 {
			return errBroken
		}
		return inbox.Unrecoverable(errBroken)
	}}
	consume(t, b, &got, config{Queue: "orders", Format: form, Retry: quick, Concurrency: 1})
	paths, err := filepath.Glob("testdata/recorded/*.json")
	if err != nil || len(paths) < 6 {
		t.Fatalf("fixtures %v, error %v", paths, err)
	}
	for i, path := range paths {
		text, err := os.ReadFile(path)
		must(t, err)
		var r recorded
		must(t, json.Unmarshal(text, &r))
		p := amqp.Publishing{
			MessageId: r.Properties.MessageID, Type: r.Properties.Type, ContentType: r.Properties.ContentType,
			Timestamp: time.Unix(r.Properties.Timestamp, 0), Headers: amqpTable(r.Headers), Body: []byte(r.Body),
		}
		b.Publish(t, "", "orders", p)
		dead := b.Take(t, "orders.failed.default", 1, testenv.Patience)[0]
		for attempt, m := range got.messages()[2*i:] {
			if m.ID != r.Want.ID || m.Name != r.Want.Name || string(m.Body) != r.Want.Body || m.ContentType != r.Want.ContentType || m.Attempt != attempt+1 {
				t.Errorf("%s: %s: received %+v", path, r.About, m)
			}
		}
		if p.Headers["type"] != nil { // PHP's serializer writes everything into the body
			if class, ids := symfonyReads(t, dead); class != p.Headers["type"] || len(ids) > 0 && ids[len(ids)-1] != r.Want.ID.String() {
				t.Errorf("%s: after its retry it is %s, %v", path, class, ids)
			}
		}
		for name, value := range dead.Headers {
			if strings.HasPrefix(name, "X-Message-Stamp-") && value != p.Headers[name] {
				t.Errorf("%s: header %s became %v", path, name, value)
			}
		}
		if string(dead.Body) != r.Body || !dead.Timestamp.Equal(p.Timestamp) {
			t.Errorf("%s: dead letter %+v", path, dead)
		}
	}
}

// Events in both modes must follow the AMQP binding, and our inbox must read them without any setting: at first,
// at a retry, as a dead letter, and if another sender sets no AMQP properties.
func TestCloudEvents(t *testing.T) {
	t.Parallel()
	for name, structured := range map[string]bool{"binary": false, "structured": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			b.Queue(t, "others", nil)
			form := format.CloudEvents{Source: "/shop", Structured: structured}
			m := driver.Message{
				ID: ids.New(), Name: "order.placed", Body: []byte(`{"cents": 4200}`), ContentType: "application/json", Key: "A-1",
				Headers: map[string]string{"cloudEvents:subject": "orders/1", "cloudEvents:datacontenttype": "x/y", "tenant": "a"}, RoutingKey: "others", CreatedAt: time.Unix(1_700_000_000, 0),
			}
			publishOne(t, b, outboxamqp.Config{Format: form}, m)
			raw := b.Take(t, "others", 1, testenv.Patience)[0]
			checkEvent(t, raw, m, structured)
			if foreign, there := raw.Headers["cloudEvents:datacontenttype"]; there {
				t.Errorf("header of a user for the content: %v", foreign)
			}

			var first sync.Once
			got := recorder{fail: func(*inbox.Message) (err error) {
				first.Do(func() { err = errors.New("not yet") })
				return err
			}}
			consume(t, b, &got, config{Queue: "own", Retry: quick})
			b.Publish(t, "", "own", amqp.Publishing{ContentType: raw.ContentType, Headers: withoutOwn(raw.Headers), Body: raw.Body})
			for i, own := range got.await(t, 2) {
				if own.ID != m.ID || own.Name != m.Name || own.Key != m.Key || string(own.Body) != string(m.Body) || own.ContentType != m.ContentType ||
					own.Headers["cloudEvents:subject"] != "orders/1" || own.Headers["cloudEvents:source"] != "/shop" || own.Headers["tenant"] != "a" ||
					!own.PublishedAt.Equal(m.CreatedAt) || own.Attempt != i+1 {
					t.Errorf("attempt %d: %+v", i+1, own)
				}
			}
			dead := withoutOwn(raw.Headers)
			dead[wire.HeaderOrigin] = "own"
			b.Publish(t, "", "own.failed.default", amqp.Publishing{ContentType: raw.ContentType, Headers: dead, Body: raw.Body})
			letters := newDeadLetters(t, b, config{Queue: "own"})
			list, err := letters.List(t.Context(), inbox.Filter{Name: m.Name, Whole: true})
			if err != nil || len(list) != 1 || list[0].Message.ID != m.ID {
				t.Errorf("dead letters %+v, %v", list, err)
			}
			edit := func(inbox.Message) ([]byte, error) { return []byte("{}"), nil }
			edited, err := letters.Replay(t.Context(), inbox.Filter{Name: m.Name, Whole: true}, inbox.Replay{By: "test", Force: true, Edit: edit})
			if refused := edited.Failed == 1 && errors.Is(err, inboxdriver.ErrNotEditable); refused != structured || edited.Returned+edited.Failed != 1 {
				t.Errorf("edited: %+v, %v", edited, err)
			}
		})
	}
}

// checkEvent reads an event by the specification alone.
func checkEvent(t *testing.T, raw amqp.Delivery, m driver.Message, structured bool) {
	t.Helper()
	want := map[string]string{
		"specversion": "1.0", "id": m.ID.String(), "source": "/shop", "type": "order.placed", "subject": "orders/1",
		"partitionkey": "A-1", "time": "2023-11-14T22:13:20Z",
	}
	if !structured {
		for name, value := range want {
			if raw.Headers["cloudEvents:"+name] != value {
				t.Errorf("%s is %v, want %s", name, raw.Headers["cloudEvents:"+name], value)
			}
		}
		if raw.ContentType != m.ContentType || string(raw.Body) != string(m.Body) || raw.Headers["cloudEvents:datacontenttype"] != nil {
			t.Errorf("%+v", raw)
		}
		return
	}
	var event map[string]json.RawMessage
	must(t, json.Unmarshal(raw.Body, &event))
	want["datacontenttype"] = m.ContentType
	for name, value := range want {
		if string(event[name]) != `"`+value+`"` {
			t.Errorf("%s is %s, want %q", name, event[name], value)
		}
	}
	if raw.ContentType != "application/cloudevents+json; charset=utf-8" || string(event["data"]) != string(m.Body) {
		t.Errorf("%+v", raw)
	}
}

// withoutOwn removes the headers that only we send.
func withoutOwn(headers amqp.Table) amqp.Table {
	others := amqp.Table{}
	for name, value := range headers {
		if name != "holdfast-key" && name != "CC" {
			others[name] = value
		}
	}
	return others
}

// An unreadable envelope must never reach a handler, which could mistake it for its own JSON, whatever its
// properties are. It becomes a dead letter unchanged.
func TestCloudEventsThatCannotBeRead(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var got recorder
	consume(t, b, &got, config{Queue: "own"})
	for typ, body := range map[string]string{
		"application/cloudevents+json":       `{"specversion":"0.3","id":"1","source":"/s","type":"order.placed","data":{}}`,
		"application/cloudevents-batch+json": `[]`,
	} {
		b.Publish(t, "", "own", amqp.Publishing{MessageId: ids.New().String(), Type: "order.placed", ContentType: typ, Body: []byte(body)})
		dead := b.Take(t, "own.failed.default", 1, testenv.Patience)[0]
		if string(dead.Body) != body || dead.ContentType != typ {
			t.Errorf("dead letter %+v", dead)
		}
	}
	b.Publish(t, "", "own", amqp.Publishing{MessageId: ids.New().String(), Type: "order.placed", ContentType: "application/json", Body: []byte("{}")})
	if all := got.await(t, 1); len(all) != 1 || all[0].ID == uuid.Nil {
		t.Errorf("processed %+v", all)
	}
}

// publishOne publishes a message like a relay, and waits for its confirm.
func publishOne(t *testing.T, b *amqptest.Broker, cfg outboxamqp.Config, m driver.Message) {
	t.Helper()
	cfg.Timeout = testenv.Patience
	p, err := outboxamqp.NewPublisher(b.Dial, cfg)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	published := make(chan error, 1)
	p.Publish(ctx, m, func(err error) { published <- err })
	must(t, <-published)
}

// Our publisher omits the content type and time of ordinary messages. The handler must still get both, through
// retries, as a dead letter and after a replay. The message must equal one with all properties from another
// sender, and one routed through another queue by another key.
func TestOmittedProperties_readAsDefaults(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "order.placed", nil)
	b.Queue(t, "detour", amqp.Table{"x-message-ttl": int32(1), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"})
	m := driver.Message{ID: ids.New(), Name: "order.placed", ContentType: "application/json", Body: []byte(`{"n":1}`), CreatedAt: time.Now()}
	publishOne(t, b, outboxamqp.Config{}, m)
	raw := b.Take(t, "order.placed", 1, testenv.Patience)[0]
	if raw.ContentType != "" || !raw.Timestamp.IsZero() || len(raw.Headers) > 0 {
		t.Errorf("on the wire: %+v", raw)
	}

	var broken atomic.Bool
	broken.Store(true)
	got := recorder{fail: failWhile(&broken, errBroken)}
	consume(t, b, &got, config{Queue: "orders", Retry: inbox.RetryPolicy{MaxAttempts: 2, BaseDelay: 50 * time.Millisecond}})
	check := func(read inbox.Message) {
		t.Helper()
		if read.ID != m.ID || read.Name != m.Name || read.ContentType != m.ContentType || string(read.Body) != string(m.Body) ||
			!read.PublishedAt.Equal(ids.Time(m.ID)) || read.PublishedAt.Sub(m.CreatedAt).Abs() > time.Second { // timing: two times of the message
			t.Errorf("received %+v", read)
		}
	}
	light := amqp.Publishing{MessageId: raw.MessageId, Type: raw.Type, DeliveryMode: raw.DeliveryMode, Body: raw.Body}
	b.Publish(t, "", "orders", light)
	awaitDepth(t, b, "orders.failed.default", 1)
	letters := newDeadLetters(t, b, config{Queue: "orders"})
	letter, err := letters.Show(t.Context(), m.ID)
	must(t, err)
	check(letter.Message)
	broken.Store(false)
	replayed, err := letters.Replay(t.Context(), inbox.Filter{Class: inboxdriver.ClassDefault}, inbox.Replay{By: "test"})
	if err != nil || replayed.Returned != 1 {
		t.Errorf("replayed %+v, %v", replayed, err)
	}
	got.await(t, 3)

	b.Publish(t, "", "detour", light)
	got.await(t, 4)
	full := light
	full.ContentType, full.Timestamp = "application/json", ids.Time(m.ID).Truncate(time.Second)
	b.Publish(t, "", "orders", full)
	seen := got.await(t, 5)
	for _, read := range seen[:4] {
		check(read)
	}
	if read := seen[4]; read.ID != m.ID || read.ContentType != m.ContentType || !read.PublishedAt.Equal(full.Timestamp) {
		t.Errorf("written out in full: %+v", read)
	}
}

// Envelopes that take long to decode are processed as usual, and so are messages that are no envelopes.
func TestSlow_largeEnvelopesAreProcessed(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var got recorder
	consume(t, b, &got, config{Queue: "orders"})
	text := `"` + strings.Repeat("x", 100_000) + `"`
	for range 5 {
		id := ids.New().String()
		event := `{"specversion":"1.0","id":"` + id + `","source":"/s","type":"large","data":` + text + `}`
		b.Publish(t, "", "orders", amqp.Publishing{ContentType: "application/cloudevents+json", Body: []byte(event)})
		b.Publish(t, "", "orders", amqp.Publishing{MessageId: ids.New().String(), Type: "plain", Body: []byte(text)})
	}
	got.distinct(t, 10)
	for _, m := range got.messages() {
		if string(m.Body) != text || m.Name != "large" && m.Name != "plain" {
			t.Errorf("processed %s: %.100s", m.Name, m.Body)
		}
	}
}
