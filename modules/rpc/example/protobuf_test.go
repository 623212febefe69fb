package main

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// protobuf is the content type of such messages.
const protobuf = "application/x-protobuf"

func encode(v any) (body []byte, contentType string, err error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, "", fmt.Errorf("%T is not a protobuf message", v)
	}
	body, err = proto.Marshal(m)
	return body, protobuf, err
}

func decode(m *inbox.Message, v any) error {
	p, ok := v.(proto.Message)
	if !ok || m.ContentType != protobuf {
		return inbox.DecodeJSON(m, v)
	}
	return proto.Unmarshal(m.Body, p)
}

func TestProtobuf_fromOutboxToHandlers(t *testing.T) {
	t.Parallel()
	manager, store, broker := txretrytest.New(txretrytest.Config{}), outboxtest.New(), inboxtest.NewBroker()
	processed, err := inboxtest.New(manager, "billing", inboxpgx.Config{})
	must(t, err)
	processed.SetDecode(decode)
	got := make(chan *shopv1.Order, 2)
	must(t, inboxpgx.Handle(processed, "order.placed", func(_ context.Context, _ pgx.Tx, order *shopv1.Order) error {
		got <- order
		return nil
	}))
	consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "billing"}, processed, inbox.ConsumerConfig{})
	must(t, err)
	relay, err := outbox.NewRelay(store, broker, outbox.RelayConfig{})
	must(t, err)

	types := outbox.Types{Encode: encode}
	must(t, outbox.Register[*shopv1.Order](&types, "order.placed", outbox.Route{}))
	order := &shopv1.Order{Id: "A-1"}
	must(t, manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		m, err := types.NewMessage(order)
		if err != nil {
			return err
		}
		return store.Write(ctx, tx, m, outbox.Message{Name: "order.placed", Body: []byte(`{"id":"A-1"}`)})
	}))
	_, err = relay.Drain(t.Context(), outbox.Bounds{})
	must(t, err)

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	for range 2 { // in protobuf, and in JSON from an older sender
		if m := <-got; !proto.Equal(m, order) {
			t.Errorf("handled %v, want %v", m, order)
		}
	}
	stop()
	must(t, <-ended)
	if _, _, err := encode(7); err == nil {
		t.Error("a number was encoded")
	}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
