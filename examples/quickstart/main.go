// Quickstart is a service that takes orders over HTTP and bills them when their
// messages come back from the broker: each order once, whatever fails in between.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
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

func (s shop) handler(once *idempotencypgx.Store) http.Handler {
	// whose keys they are; yours comes from authentication
	user := func(r *http.Request) (string, error) { return r.Header.Get("X-User-Id"), nil }
	protect := must(idempotency.NewMiddleware(once, user, idempotency.MiddlewareConfig{}))
	mux := http.NewServeMux()
	mux.Handle("POST /orders", protect(once.Handler(s.place)))
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

// orders are the messages that the consumer asks for.
var orders = []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}}

var (
	backend = flag.String("backend", "memory", "memory, or services (DATABASE_URL, AMQP_URL)")
	addr    = flag.String("addr", "127.0.0.1:8080", "`address` to listen on")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *backend == "memory" {
		check(inMemory(ctx))
		return
	}
	pool := must(pgxpool.New(ctx, os.Getenv("DATABASE_URL")))
	defer pool.Close()
	dial := outboxamqp.Dial(os.Getenv("AMQP_URL"), amqp.Config{})
	manager := must(txretry.New(pool, txretry.Config{}))
	once := must(idempotencypgx.New(manager, idempotencypgx.Config{}))
	store := must(outboxpgx.New(pool, outboxpgx.Config{}))
	publisher := must(outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "shop"}))
	relay := must(outbox.NewRelay(store, publisher, outbox.RelayConfig{}))
	books := must(inboxpgx.New(manager, "billing", inboxpgx.Config{}))
	consumer := must(inboxamqp.NewConsumer(dial, "billing", books, inboxamqp.Config{Bindings: orders}))
	s := shop{insert(addOrder), insert(addInvoice), store}
	check(inboxpgx.Handle(books, "order.placed", s.bill))
	for _, step := range []func(context.Context) error{ // safe in many processes at once
		store.Migrate, books.Migrate, once.Migrate, publisher.Setup, consumer.Setup,
		func(ctx context.Context) error { _, err := pool.Exec(ctx, tables); return err },
	} {
		check(step(ctx))
	}
	check(serve(ctx, s.handler(once), consumer.Run, relay.Run))
}

// serve runs until ctx ends. Then requests and consumer finish what they have in
// hand; the relay, which publishes what they wrote, ends last.
func serve(ctx context.Context, handler http.Handler, consume, relay func(context.Context) error) error {
	listener := listen()
	behind, stop := context.WithCancel(context.WithoutCancel(ctx))
	ctx, cancel := context.WithCancel(ctx)
	var last errgroup.Group
	last.Go(func() error { defer cancel(); return relay(behind) })
	first, ctx := errgroup.WithContext(ctx)
	first.Go(func() error { return consume(ctx) })
	server := &http.Server{Handler: handler, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second}
	first.Go(func() error { return except(server.Serve(listener), http.ErrServerClosed) })
	first.Go(func() error { <-ctx.Done(); return server.Shutdown(context.WithoutCancel(ctx)) })
	err := first.Wait()
	stop()
	return errors.Join(err, last.Wait())
}

// listen takes the port, and says how to send an order.
func listen() net.Listener {
	listener := must(net.Listen("tcp", *addr))
	const curl = "listening; try\ncurl -i http://%s/orders -H 'X-User-Id: me' -H 'Idempotency-Key: %s' -d '{\"cents\": 4200}'"
	log.Printf(curl, listener.Addr(), idempotency.NewKey())
	return listener
}

// except returns err, unless it is the one that is expected.
func except(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}

func must[T any](v T, err error) T { check(err); return v } // a constructor fails for a wrong Config only

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
