package inboxamqp_test

import (
	"context"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A retry whose queue is missing when its time is up waits for it: the broker tries again
// after dead_letter_worker_publisher_confirm_timeout, which is 5 s here.
func TestRetryFindsNoQueue(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.RabbitMQ)
	dial := func(context.Context) (*amqp.Connection, error) { return amqp.Dial(server.URL()) }
	var got recorder
	c := newConsumer(t, dial, &got, config{Queue: "orders", Retry: quick})
	setup := func() {
		t.Helper()
		setUp(t, c)
	}
	setup()
	conn, err := dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDelete("orders", false, false, false); err != nil {
		t.Fatal(err)
	}
	if err := ch.PublishWithContext(t.Context(), "", "orders.retry.100", true, false, order()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second) // the time of the retry is up
	setup()
	began := time.Now()
	start(t, c)
	got.await(t, 1)
	t.Logf("arrived %v after its queue", time.Since(began))
}
