package inboxamqp_test

import (
	"strings"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

// Envelopes that take long to decode reach the processor as what they are, and messages that are no envelopes too.
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
