package main

import (
	"context"
	"net/http"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// app is the service without any server.
type app struct {
	handler  http.Handler
	relay    *outbox.Relay
	consumer *inboxtest.Consumer
	data     *memory
}

// newApp makes the same shop, relay and consumer on fakes. Tests pass faults.
func newApp(group *service.Group, queue inboxtest.Queue, faults ...txretrytest.Fault) app {
	manager := txretrytest.New(txretrytest.Config{Script: faults})
	store, broker := outboxtest.New(), inboxtest.NewBroker()
	once := must(idempotencytest.New(manager, idempotencypgx.Config{})) // a real store, its records in memory
	books := must(inboxtest.New(manager, "billing", inboxpgx.Config{})) // a real store, its entries in memory
	data := &memory{orders: map[string]int{}, invoices: map[string]int{}}
	s := shop{data.addOrder, data.addInvoice, store}
	check(inboxpgx.Handle(books, "order.placed", s.bill))
	relay := must(outbox.NewRelay(store, broker, outbox.RelayConfig{}))
	consumer := must(inboxtest.NewConsumer(broker, queue, books, inbox.ConsumerConfig{}))
	return app{s.handler(once, group.Ready(nil)), relay, consumer, data}
}

func inMemory(group *service.Group) {
	a := newApp(group, inboxtest.Queue{Names: []string{"order.*"}})
	serve(group, a.handler)
	group.Add("billing", a.consumer)
	group.Last("relay", a.relay)
}

// memory replaces two tables: it counts how often each order was placed and billed.
type memory struct {
	mu               sync.Mutex
	orders, invoices map[string]int
}

func (m *memory) addOrder(_ context.Context, tx pgx.Tx, o order) error {
	return m.add(tx, m.orders, o)
}

func (m *memory) addInvoice(_ context.Context, tx pgx.Tx, o order) error {
	return m.add(tx, m.invoices, o)
}

// add is one statement. A rollback undoes it.
func (m *memory) add(tx pgx.Tx, table map[string]int, o order) error {
	change := func(by int) func() {
		return func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			table[o.ID] += by
		}
	}
	return txretrytest.Effect(tx, change(1), change(-1))
}

// counts returns the numbers of orders and invoices.
func (m *memory) counts() (orders, invoices int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range m.orders {
		orders += n
	}
	for _, n := range m.invoices {
		invoices += n
	}
	return orders, invoices
}
