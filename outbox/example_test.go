package outbox_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func Example() {
	ctx := context.Background()
	manager := txretrytest.New(txretrytest.Config{}) // txretry.New on Postgres
	store := outboxtest.New()                        // outboxpgx.New on Postgres
	publisher := outboxtest.NewPublisher()           // outboxamqp or outboxredis

	place := func(order string, fail error) error {
		return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			// … the business change, in the same transaction …
			m, err := outbox.NewMessage("order.placed", map[string]string{"order": order})
			if err != nil {
				return err
			}
			m.Key = order
			if err := store.Write(ctx, tx, m); err != nil {
				return err
			}
			return fail
		})
	}
	fmt.Println(place("A-1", nil))
	fmt.Println(place("A-2", errors.New("card declined")))

	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	report, err := relay.Drain(ctx, outbox.Bounds{})
	fmt.Println(report.Published, report.ExitCode(), err)
	for _, m := range publisher.Received() {
		fmt.Println(m.Name, string(m.Body))
	}
	// Output:
	// <nil>
	// card declined
	// 1 0 <nil>
	// order.placed {"order":"A-1"}
}

func ExampleRegister() {
	type OrderPlaced struct {
		Order string `json:"order"`
	}
	var types outbox.Types
	if err := outbox.Register[OrderPlaced](&types, "order.placed", outbox.Route{Exchange: "orders"}); err != nil {
		fmt.Println(err)
		return
	}
	m, err := types.NewMessage(OrderPlaced{Order: "A-1"})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(m.Name, string(m.Body))
	fmt.Println(m.Route.Exchange)
	// Output:
	// order.placed {"order":"A-1"}
	// orders
}
