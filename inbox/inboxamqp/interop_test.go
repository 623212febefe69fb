package inboxamqp_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/symfony"
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

// symfonyReads does what Messenger's serializer does with a message, and returns the type and
// the ids in the stamps that it would decode.
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

// What our outbox writes in its compatible form is read by Symfony, and by our own inbox.
func TestToSymfony(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "topic")
	b.Queue(t, "php", nil)
	b.Bind(t, "php", "order.*", "events")
	format := symfony.Format{Classes: map[string]string{"order.placed": `App\OrderPlaced`}, IDStamp: `App\Uid`}
	var got recorder
	consume(t, b, &got, config{Queue: "go", Format: format, Retry: quick, Bindings: []inboxamqp.Binding{{Exchange: "events", Key: "order.*"}}})
	m := driver.Message{
		ID: uuid.MustParse(symfonyID), Name: "order.placed", Body: []byte(`{"orderId":"A-1","total":4200}`), CreatedAt: time.Now(),
	}
	publishOne(t, b, outboxamqp.Config{Exchange: "events", Format: format}, m)
	raw := b.Take(t, "php", 1, testenv.Patience)[0]
	class, ids := symfonyReads(t, raw)
	if class != `App\OrderPlaced` || len(ids) != 1 || ids[0] != symfonyID || raw.ContentType != "application/json" {
		t.Errorf("Symfony reads %s, %v: %+v", class, ids, raw)
	}
	if own := got.await(t, 1)[0]; own.ID != m.ID || own.Name != m.Name || string(own.Body) != string(m.Body) {
		t.Errorf("we read %+v", own)
	}
	// One that PHP has sent has neither property.
	b.Publish(t, "", "go", amqp.Publishing{Headers: raw.Headers, Body: raw.Body})
	if own := got.await(t, 2)[1]; own.ID != m.ID || own.Name != m.Name {
		t.Errorf("we read %+v", own)
	}
	// An operator finds the dead letters by the name.
	b.Publish(t, "", "failed.validation", amqp.Publishing{Headers: raw.Headers, Body: raw.Body})
	letters, err := newDeadLetters(t, b, config{Queue: "go", Format: format}).List(t.Context(), inbox.Filter{Name: m.Name})
	if err != nil || len(letters) != 1 || letters[0].Message.ID != m.ID {
		t.Errorf("dead letters %+v, %v", letters, err)
	}
}

// recorded is a message of a real Symfony Messenger, as `make interop RECORD=1` has seen it.
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

// What a real Symfony has sent, put back or given up is a message to us: with its class, with the name and
// the stamps of freyr/message-broker, after its retries and from its failure transport. Our copies of it, after
// retries and as a dead letter, are still messages that Symfony can read.
func TestRecorded(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	format := symfony.Format{Classes: map[string]string{"order.placed": `App\Message\OrderPlaced`}, IDStamp: `App\Messenger\MessageIdStamp`}
	got := recorder{fail: func(m *inbox.Message) error {
		if m.Attempt < 2 {
			return errBroken
		}
		return inbox.Unrecoverable(errBroken)
	}}
	consume(t, b, &got, config{Queue: "orders", Format: format, Retry: quick, Concurrency: 1})
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
		dead := b.Take(t, "failed.unrecoverable", 1, testenv.Patience)[0]
		for attempt, m := range got.messages()[2*i:] {
			if m.ID != r.Want.ID || m.Name != r.Want.Name || string(m.Body) != r.Want.Body || m.ContentType != r.Want.ContentType || m.Attempt != attempt+1 {
				t.Errorf("%s: %s: received %+v", path, r.About, m)
			}
		}
		if p.Headers["type"] != nil { // PHP's serializer writes all into the body
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

// A copy without the sender's headers is still the same message to us.
func TestSymfonyProducerWithFullHeaders(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var got recorder
	got.fail = func(m *inbox.Message) error {
		if m.Attempt == 1 {
			return errBroken
		}
		return nil
	}
	consume(t, b, &got, config{Queue: "orders", Retry: quick, Concurrency: 1})
	for k, stamp := range []string{"X-Message-Stamp-MessageIdStamp", `X-Message-Stamp-App\Messenger\MessageIdStamp`} {
		id := ids.New().String()
		b.Publish(t, "", "orders", amqp.Publishing{Body: []byte(`{"n":1}`), Headers: amqp.Table{
			"type": "order.placed", stamp: `[{"messageId":"` + id + `"}]`, "Content-Type": "application/json", "big": strings.Repeat("h", 100<<10),
		}})
		m := got.await(t, 2*k+2)[2*k+1]
		if m.ID.String() != id || m.Name != "order.placed" || m.ContentType != "application/json" || m.Headers["big"] != "" || m.Attempt != 2 {
			t.Errorf("%s: second attempt %+v", stamp, m)
		}
	}
}
