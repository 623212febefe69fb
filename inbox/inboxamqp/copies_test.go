package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// While copies have no connection, a failed message waits in its worker: its handler does
// not run again, the others do, and the consumer is not ready.
func TestCopiesUnavailable(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var down atomic.Bool
	var refused atomic.Int64
	dial := func(ctx context.Context) (*amqp.Connection, error) {
		if down.Load() {
			refused.Add(1)
			return nil, errBroken
		}
		return b.Dial(ctx)
	}
	var got recorder
	got.fail = func(m *inbox.Message) error {
		if m.Name == "bad" && m.Attempt == 1 {
			return errBroken
		}
		return nil
	}
	c := newConsumer(t, b.Dial, &got, config{Queue: "orders", Retry: quick, Concurrency: 2, Copies: dial})
	setUp(t, c)
	down.Store(true)
	r := start(t, c)
	bad := order()
	bad.Type = "bad"
	b.Publish(t, "", "orders", bad)
	got.await(t, 1)
	b.Publish(t, "", "orders", order())
	got.await(t, 2)
	// The pauses between the attempts to connect grow: this takes some seconds.
	before := refused.Load()
	testenv.Eventually(t, func() error {
		if n := refused.Load(); n < before+5 {
			return fmt.Errorf("refused %d times", n)
		}
		return nil
	})
	if err := r.Ready(t.Context()); !errors.Is(err, errBroken) {
		t.Errorf("ready: %v", err)
	}
	down.Store(false)
	seen := got.await(t, 3)
	if len(seen) != 3 || seen[2].Name != "bad" || seen[2].Attempt != 2 {
		t.Errorf("deliveries %+v", seen)
	}
	ready(t, r)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
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
