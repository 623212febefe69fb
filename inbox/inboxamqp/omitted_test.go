package inboxamqp_test

import (
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

// A message of ours whose content type and time are not on the wire has both for its handler, through
// retries, as a dead letter and when it returns; and it is the message that another sender writes out in
// full, or that has come through a queue that routes it on by another key.
func TestLeftOut(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "order.placed", nil)
	b.Queue(t, "detour", amqp.Table{"x-message-ttl": int32(1), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"})
	m := driver.Message{ID: ids.New(), Name: "order.placed", ContentType: "application/json", Body: []byte(`{"n":1}`), CreatedAt: time.Now()}
	publishOne(t, b, outboxamqp.Config{}, m)
	raw := b.Take(t, "order.placed", 1, patience)[0]
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
			!read.PublishedAt.Equal(ids.Time(m.ID)) || read.PublishedAt.Sub(m.CreatedAt).Abs() > time.Second {
			t.Errorf("received %+v", read)
		}
	}
	light := amqp.Publishing{MessageId: raw.MessageId, Type: raw.Type, DeliveryMode: raw.DeliveryMode, Body: raw.Body}
	b.Publish(t, "", "orders", light)
	awaitDepth(t, b, "failed.default", 1)
	letters := newDeadLetters(t, b, config{Queue: "orders"})
	letter, err := letters.Show(t.Context(), m.ID)
	if err != nil {
		t.Fatal(err)
	}
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
