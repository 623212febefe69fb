package main

import (
	"net/http"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
)

// The statements are those of main, on a schema that lasts as long as the test.
func TestAnOrderIsStoredWithItsMessage(t *testing.T) {
	pool := pgtest.New(t)
	manager := must(txretry.New(pool, txretry.Config{}))
	once := must(idempotencypgx.New(manager, idempotencypgx.Config{}))
	store := must(outboxpgx.New(pool, outboxpgx.Config{}))
	check(store.Migrate(t.Context()))
	check(once.Migrate(t.Context()))
	must(pool.Exec(t.Context(), tables))

	s := shop{insert(addOrder), insert(addInvoice), store}
	if w := post(s.handler(once), idempotency.NewKey()); w.Code != http.StatusCreated {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	var orders, messages int
	check(pool.QueryRow(t.Context(), "SELECT count(*) FROM orders WHERE cents = 4200").Scan(&orders))
	check(pool.QueryRow(t.Context(), "SELECT count(*) FROM holdfast_outbox WHERE name = 'order.placed'").Scan(&messages))
	if orders != 1 || messages != 1 {
		t.Errorf("%d orders, %d messages, want one each", orders, messages)
	}
}
