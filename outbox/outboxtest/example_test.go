package outboxtest_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Committed messages are pending; messages of a rolled-back transaction are not.
func ExampleStore() {
	ctx := context.Background()
	manager, store := txretrytest.New(txretrytest.Config{}), outboxtest.New()
	place := func(order string, fail error) error {
		return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			m, err := outbox.NewMessage("order.placed", map[string]string{"order": order})
			if err != nil {
				return err
			}
			return errors.Join(store.Write(ctx, tx, m), fail)
		})
	}
	fmt.Println(place("A-1", nil))
	fmt.Println(place("A-2", errors.New("card declined")))
	for _, m := range store.Pending() {
		fmt.Println(m.Name, string(m.Body))
	}
	// Output:
	// <nil>
	// card declined
	// order.placed {"order":"A-1"}
}

// The publisher fails by script. The relay gives the message up, and an operator replays it.
func ExampleStore_DeadLetters() {
	ctx := context.Background()
	manager, store, publisher := txretrytest.New(txretrytest.Config{}), outboxtest.New(), outboxtest.NewPublisher()
	publisher.Script(errors.New("no such queue"))
	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 1}})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return store.Write(ctx, tx, outbox.Message{Name: "order.placed", Body: []byte(`{"order":"A-1"}`)})
	})
	fmt.Println(err)
	report, err := relay.Drain(ctx, outbox.Bounds{})
	fmt.Println(report.Dead, err)
	letters, err := store.DeadLetters().List(ctx, outbox.Filter{})
	fmt.Println(letters[0].Message.Name, letters[0].Attempts, letters[0].Error, err)
	replayed, err := store.DeadLetters().Replay(ctx, outbox.Filter{}, outbox.Replay{By: "ada", Reason: "the queue is back"})
	fmt.Println(replayed.Returned, err)
	report, err = relay.Drain(ctx, outbox.Bounds{})
	fmt.Println(report.Published, err)
	// Output:
	// <nil>
	// 1 <nil>
	// order.placed 1 no such queue <nil>
	// 1 <nil>
	// 1 <nil>
}
