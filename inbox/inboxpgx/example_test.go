package inboxpgx_test

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

type OrderPlaced struct {
	Order string `json:"order"`
}

// Every message is delivered twice; its effect is taken once.
func Example() {
	// In production: txretry.New(pool, …), and no Dedup, which means the table.
	manager := txretrytest.New(txretrytest.Config{})
	p, err := inboxpgx.NewProcessor(manager, inboxpgx.Config{
		Consumer: "billing",
		Dedup:    inboxtest.NewDedup(),
		Hooks: inboxpgx.Hooks{OnDuplicate: func(_ context.Context, m *inbox.Message) {
			fmt.Println("skipped a copy of", m.Name)
		}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = inboxpgx.Handle(p, "order.placed", func(_ context.Context, _ pgx.Tx, o OrderPlaced) error {
		fmt.Println("invoice for", o.Order) // in production: statements on tx
		return nil
	}, inboxpgx.HandlerConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}

	broker, err := inboxtest.NewBroker(p, inboxtest.Config{DeliverTwice: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- broker.Run(ctx) }()
	m := &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: "order.placed", Body: []byte(`{"order":"A-1"}`)}
	if err := broker.Publish(ctx, m); err != nil {
		fmt.Println(err)
	}
	if err := broker.Idle(ctx); err != nil {
		fmt.Println(err)
	}
	cancel()
	fmt.Println("stopped:", <-done)
	// Output:
	// invoice for A-1
	// skipped a copy of order.placed
	// stopped: <nil>
}
