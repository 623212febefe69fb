package service_test

import (
	"context"
	"fmt"
	"net"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// A service on the fakes: an API, a consumer and a relay. On real servers Prepare migrates the database, and Add and
// Last get the Setup of consumer and publisher.
func Example() {
	ctx, interrupt := context.WithCancel(context.Background()) // a program uses service.Signals()
	manager, store, broker := txretrytest.New(txretrytest.Config{}), outboxtest.New(), inboxtest.NewBroker()
	books := must(inboxtest.New(manager, "billing", inboxpgx.Config{}))
	check(inboxpgx.Handle(books, "order.placed", func(_ context.Context, _ pgx.Tx, id string) error {
		fmt.Println("billed", id)
		interrupt() // ends this example; running handlers finish
		return nil
	}))
	relay := must(outbox.NewRelay(store, broker, outbox.RelayConfig{}))
	consumer := must(inboxtest.NewConsumer(broker, inboxtest.Queue{Names: []string{"order.*"}}, books, inbox.ConsumerConfig{}))

	group := &service.Group{}
	check(group.Prepare(ctx, "postgres", func(context.Context) error { return nil })) // store.Migrate, books.Migrate
	mux := http.NewServeMux()
	mux.Handle("GET /readyz", group.Ready(nil)) // map[string]func(context.Context) error{"postgres": pool.Ping}
	group.Serve(must(net.Listen("tcp", "127.0.0.1:0")), &http.Server{Handler: mux})
	group.Add("billing", consumer)
	group.Last("relay", relay)

	check(manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { // the work of a request
		return store.Write(ctx, tx, must(outbox.NewMessage("order.placed", "A1")))
	}))
	check(group.Run(ctx))
	fmt.Println("stopped")
	// Output:
	// billed A1
	// stopped
}

func must[T any](v T, err error) T { check(err); return v }

func check(err error) {
	if err != nil {
		panic(err)
	}
}
