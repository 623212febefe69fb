// Package service runs the parts of a service: it waits for servers at the start, answers readiness probes,
// and stops the parts in the right order.
//
//	ctx := service.Signals()
//	group := &service.Group{}
//	err := group.Prepare(ctx, "postgres", store.Migrate, books.Migrate)
//	mux.Handle("GET /readyz", group.Ready(map[string]func(context.Context) error{"postgres": pool.Ping}))
//	group.Serve(listener, &http.Server{Handler: mux})
//	group.Add("billing", consumer, publisher.Setup, consumer.Setup)
//	group.Last("relay", relay, publisher.Setup)
//	err = group.Run(ctx)
//	pool.Close()
//
// # Start
//
// [Group.Prepare] blocks until the servers that everything needs have answered, usually the database. The steps
// of [Group.Add] and [Group.Last] are tried while the other parts already run: the API serves requests
// while the broker is down, and the messages wait in the outbox.
//
// A failed step is tried again, after 100 ms at first and 2 s at most. The first failure is logged, then one
// line in 10 s. A server that answers and rejects the client (wrong password, unknown database or virtual host,
// missing right) is tried for 5 s only. To limit the whole wait, give Prepare a context with a timeout.
//
// # End
//
// The shutdown starts when the context ends or a part ends, with an error, with nil or by a panic.
//
//  1. Readiness probes are answered with 503. After DrainDelay:
//  2. The HTTP servers stop accepting, and finish the requests that are running.
//  3. The parts of Add stop, all at once: consumers and sweepers.
//  4. The parts of Last stop: the relay, which publishes the messages that the others have written.
//  5. Run returns, and the program closes its pools.
//
// Each of the steps 2 to 4 has StopTimeout. A part that has not ended by then is abandoned and named in the error
// of Run. A second signal ends the process at once.
//
// The package needs the standard library only and is not bound to Holdfast: a part is anything with a method
// Run(ctx) that blocks until ctx ends.
package service
