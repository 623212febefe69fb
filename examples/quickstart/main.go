// Quickstart is a service that takes orders over HTTP and bills them when their
// messages come back from the broker: each order once, whatever fails in between.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"flag"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

type order struct {
	ID    string `json:"id"`
	Cents int    `json:"cents"`
}

// shop is the business code. Its ports are SQL and *outboxpgx.Store here, maps and
// *outboxtest.Store in memory.go.
type shop struct {
	addOrder, addInvoice func(ctx context.Context, tx pgx.Tx, o order) error
	outbox               interface {
		Write(ctx context.Context, tx pgx.Tx, messages ...outbox.Message) error
	}
}

// place is POST /orders: order, message and answer commit together. Like every
// transaction it may run more than once.
func (s shop) place(ctx context.Context, tx pgx.Tx, r *http.Request) (idempotency.Response, error) {
	var o order
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
		return idempotency.JSON(http.StatusBadRequest, "an order is a JSON object")
	}
	o.ID = rand.Text()
	if err := s.addOrder(ctx, tx, o); err != nil {
		return idempotency.Response{}, err
	}
	m, err := outbox.NewMessage("order.placed", o)
	if err != nil {
		return idempotency.Response{}, err
	}
	m.Key = o.ID // messages of one order stay in order
	if err := s.outbox.Write(ctx, tx, m); err != nil {
		return idempotency.Response{}, err
	}
	return idempotency.JSON(http.StatusCreated, o)
}

// bill is the consumer's handler: the invoice commits together with the mark that
// the message is done.
func (s shop) bill(ctx context.Context, tx pgx.Tx, o order) error {
	txretry.AfterCommit(tx, func() { log.Printf("billed %s: %d cents", o.ID, o.Cents) })
	return s.addInvoice(ctx, tx, o)
}

func (s shop) handler(once *idempotencypgx.Store, ready http.Handler) http.Handler {
	// the owner of the keys; yours comes from authentication
	user := func(r *http.Request) (string, error) { return r.Header.Get("X-User-Id"), nil }
	protect := must(idempotency.NewMiddleware(once, user, idempotency.MiddlewareConfig{}))
	mux := http.NewServeMux()
	mux.Handle("POST /orders", protect(once.Handler(s.place)))
	mux.Handle("GET /readyz", ready)
	return mux
}

func insert(sql string) func(context.Context, pgx.Tx, order) error {
	return func(ctx context.Context, tx pgx.Tx, o order) error {
		_, err := tx.Exec(ctx, sql, o.ID, o.Cents)
		return err
	}
}

const (
	tables = `CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, cents int NOT NULL);
		CREATE TABLE IF NOT EXISTS invoices (order_id text NOT NULL, cents int NOT NULL)`
	addOrder   = "INSERT INTO orders (id, cents) VALUES ($1, $2)"
	addInvoice = "INSERT INTO invoices (order_id, cents) VALUES ($1, $2)"
)

// orders are the messages that the consumer receives.
var orders = []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}}

var (
	backend = flag.String("backend", "memory", "memory, or services (DATABASE_URL, AMQP_URL)")
	addr    = flag.String("addr", "127.0.0.1:8080", "`address` to listen on")
)

func main() {
	flag.Parse()
	ctx, group := service.Signals(), &service.Group{}
	if *backend == "memory" {
		inMemory(group)
		check(group.Run(ctx))
		return
	}
	pool := must(pgxpool.New(ctx, env("DATABASE_URL")))
	dial := outboxamqp.Dial(env("AMQP_URL"), amqp.Config{})
	manager := must(txretry.New(pool, txretry.Config{}))
	once := must(idempotencypgx.New(manager, idempotencypgx.Config{}))
	store := must(outboxpgx.New(pool, outboxpgx.Config{}))
	publisher := must(outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "shop"}))
	relay := must(outbox.NewRelay(store, publisher, outbox.RelayConfig{}))
	books := must(inboxpgx.New(manager, "billing", inboxpgx.Config{}))
	consumer := must(inboxamqp.NewConsumer(dial, inboxamqp.Queue{Bindings: orders}, books, inbox.ConsumerConfig{}))
	s := shop{insert(addOrder), insert(addInvoice), store}
	check(inboxpgx.Handle(books, "order.placed", s.bill))

	createTables := func(ctx context.Context) error { _, err := pool.Exec(ctx, tables); return err }
	check(group.Prepare(ctx, "postgres", createTables, store.Migrate, books.Migrate, once.Migrate))
	serve(group, s.handler(once, group.Ready(map[string]func(context.Context) error{"postgres": pool.Ping})))
	group.Add("billing", consumer, publisher.Setup, consumer.Setup)
	group.Last("relay", relay, publisher.Setup, consumer.Setup) // it publishes after the queue exists
	check(group.Run(ctx))
	pool.Close()
}

// serve listens, and prints how to send an order.
func serve(group *service.Group, handler http.Handler) {
	listener := must(net.Listen("tcp", *addr))
	const curl = "listening; try\ncurl -i http://%s/orders -H 'X-User-Id: me' -H 'Idempotency-Key: %s' -d '{\"cents\": 4200}'"
	log.Printf(curl, listener.Addr(), idempotency.NewKey())
	group.Serve(listener, &http.Server{Handler: handler, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second})
}

// env returns an address without a default: a service must not write to a server that nobody named.
func env(name string) string {
	value := os.Getenv(name)
	if value == "" {
		log.Fatalf("%s is not set", name)
	}
	return value
}

func must[T any](v T, err error) T { check(err); return v } // a constructor fails for a wrong Config only

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
