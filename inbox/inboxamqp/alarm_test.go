package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Under a memory alarm the broker takes no copies. Failed messages wait for its end, more than
// there are workers and than the prefetch holds, and the consumption of the others goes on: it is
// what ends the alarm.
func TestMemoryAlarm(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.RabbitMQ)
	b := amqptest.On(t, server.URL(), server.AdminURL())
	var done atomic.Int64
	got := recorder{fail: func(m *inbox.Message) error {
		if m.Name == "bad" && m.Attempt == 1 {
			return errBroken
		}
		done.Add(1)
		return nil
	}}
	// The alarm must not outlast the wait for a confirm: the copy would be published once more.
	c := newConsumer(t, b.Dial, &got, config{Queue: "orders", Retry: quick, ConfirmTimeout: patience})
	setUp(t, c)
	const bad, good = 60, 200
	publishAll(t, b, "orders", "bad", bad)
	publishAll(t, b, "orders", "order.placed", good)
	alarm := func(limit string) {
		t.Helper()
		if err := server.Control(t.Context(), "set_vm_memory_high_watermark", "absolute", limit); err != nil {
			t.Fatal(err)
		}
	}
	alarm("10MB")
	r := start(t, c)
	passed := func(n int64) {
		t.Helper()
		testenv.Eventually(t, func() error {
			if d := done.Load(); d < n {
				return fmt.Errorf("%d of %d messages", d, n)
			}
			return nil
		})
	}
	passed(good)
	if err := r.Ready(t.Context()); err == nil {
		t.Error("ready under an alarm")
	}
	if n := len(got.messages()); n > bad+good {
		t.Errorf("%d deliveries of %d messages: handlers ran for nothing", n, bad+good)
	}
	alarm("1GB")
	passed(good + bad)
	ready(t, r)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
	awaitDepth(t, b, "failed.default", 0)
}

// publishAll sends n messages of a name over one connection.
func publishAll(t *testing.T, b *amqptest.Broker, queue, name string, n int) {
	t.Helper()
	ch := b.Channel(t)
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	var last *amqp.DeferredConfirmation
	for range n {
		p := order()
		p.Type = name
		var err error
		if last, err = ch.PublishWithDeferredConfirm("", queue, true, false, p); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if ok, err := last.WaitContext(ctx); err != nil || !ok {
		t.Fatal(errors.Join(err, errors.New("not confirmed")))
	}
}
