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

// A message that is delivered twice takes effect once.
func Example() {
	// In production: txretry.New(pool, …) and inboxpgx.New(manager, …).
	manager := txretrytest.New(txretrytest.Config{})
	billing, err := inboxtest.New(manager, "billing", inboxpgx.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = inboxpgx.Handle(billing, "order.placed", func(_ context.Context, _ pgx.Tx, o OrderPlaced) error {
		fmt.Println("invoice for", o.Order) // in production: statements on tx
		return nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}

	// A consumer calls Process for the messages that it receives.
	m := &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: "order.placed", Body: []byte(`{"order":"A-1"}`)}
	for range 2 {
		fmt.Println(billing.Process(context.Background(), []*inbox.Message{m}))
	}
	// Output:
	// invoice for A-1
	// [<nil>]
	// [<nil>]
}
