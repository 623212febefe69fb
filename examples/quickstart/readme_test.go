package main

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// TestReadme_example runs the code of the README: the message commits with the order, and two deliveries make one invoice.
func TestReadme_example(t *testing.T) {
	ctx, pool := t.Context(), newSchema(t)
	manager := must(txretry.New(pool, txretry.Config{}))
	store := must(outboxpgx.New(pool, outboxpgx.Config{}))
	books := must(inboxpgx.New(manager, "billing", inboxpgx.Config{}))
	o := order{ID: "o1", Cents: 4200}
	placed, err := outbox.NewMessage("order.placed", o)
	check(err)

	err = manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders VALUES ($1, $2)", o.ID, o.Cents); err != nil {
			return err
		}
		return store.Write(ctx, tx, placed) // commits with the order; a relay publishes it
	})
	if err != nil {
		t.Fatal(err)
	}

	err = inboxpgx.Handle(books, "order.placed", func(ctx context.Context, tx pgx.Tx, o order) error {
		_, err := tx.Exec(ctx, "INSERT INTO invoices VALUES ($1, $2)", o.ID, o.Cents)
		return err // the invoice commits with the mark that the message is done
	})
	if err != nil {
		t.Fatal(err)
	}

	for range 2 {
		delivered := &inbox.Message{ID: placed.ID, Name: placed.Name, Body: placed.Body}
		for _, err := range books.Process(ctx, []*inbox.Message{delivered}) {
			if err != nil {
				t.Error(err)
			}
		}
	}
	var orders, messages, invoices int
	counts := "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM holdfast_outbox), (SELECT count(*) FROM invoices)"
	if err := pool.QueryRow(ctx, counts).Scan(&orders, &messages, &invoices); err != nil {
		t.Fatal(err)
	}
	if orders != 1 || messages != 1 || invoices != 1 {
		t.Errorf("%d orders, %d messages, %d invoices, want one of each", orders, messages, invoices)
	}
}
