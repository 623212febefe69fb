package main

import (
	"context"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// onPostgres has the parts of main, and its statements.
type onPostgres struct {
	shop
	once  *idempotencypgx.Store
	books *inboxpgx.Store
	store *outboxpgx.Store
}

func newOnPostgres(pool *pgxpool.Pool) onPostgres {
	manager := must(txretry.New(pool, txretry.Config{}))
	once := must(idempotencypgx.New(manager, idempotencypgx.Config{}))
	books := must(inboxpgx.New(manager, "billing", inboxpgx.Config{}))
	store := must(outboxpgx.New(pool, outboxpgx.Config{}))
	s := shop{insert(addOrder), insert(addInvoice), store}
	check(inboxpgx.Handle(books, "order.placed", s.bill))
	return onPostgres{s, once, books, store}
}

// newSchema has the tables, in a schema that lasts as long as the test.
func newSchema(t *testing.T) *pgxpool.Pool {
	pool := pgtest.New(t)
	p := newOnPostgres(pool)
	for _, migrate := range []func(context.Context) error{p.once.Migrate, p.books.Migrate, p.store.Migrate} {
		check(migrate(t.Context()))
	}
	must(pool.Exec(t.Context(), tables))
	return pool
}

// One key makes one order with one message, and gets one answer, if the transaction is killed, cut off or refused at any
// statement, or if two requests run at once. The id of an order is random, so it is left out.
func TestPlaceIsProven(t *testing.T) {
	idempotencytest.Prove(t, txretrytest.Proof{
		Pool:  newSchema(t),
		Reset: "TRUNCATE orders, holdfast_outbox, holdfast_idempotency",
		Rows:  []string{"SELECT cents FROM orders", "SELECT m.name FROM holdfast_outbox m JOIN orders o ON o.id = m.ordering_key"},
	}, func(pool *pgxpool.Pool) (func(context.Context, idempotency.Key) (idempotency.Response, error), error) {
		p := newOnPostgres(pool)
		handler := p.handler(p.once, http.NotFoundHandler())
		return func(_ context.Context, key idempotency.Key) (idempotency.Response, error) {
			w := post(handler, key)
			return idempotency.Response{Status: w.Code, Header: w.Header(), Body: w.Body.Bytes()}, nil
		}, nil
	})
}

// An order has one invoice, however often and to however many processes its message is delivered.
func TestBillIsProven(t *testing.T) {
	inboxtest.Prove(t, txretrytest.Proof{
		Pool:  newSchema(t),
		Reset: "TRUNCATE invoices, holdfast_inbox",
		Rows:  []string{"TABLE invoices"},
	}, inbox.Message{Name: "order.placed", Body: []byte(`{"id": "o1", "cents": 4200}`)},
		func(pool *pgxpool.Pool) (inbox.Processor, error) { return newOnPostgres(pool).books, nil })
}
