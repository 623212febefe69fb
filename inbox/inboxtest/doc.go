// Package inboxtest has the fakes of an inbox: Broker, queues in memory with redelivery, retry
// delays and dead letters; Consumer, which is the consumer of production on one of them, for any
// inbox.Processor; and New, an inboxpgx.Store with its entries in memory. With them the handlers and
// the relay of production run without any server, in a test or in a demonstration.
//
//	manager := txretrytest.New(txretrytest.Config{})
//	books, err := inboxtest.New(manager, "billing", inboxpgx.Config{})
//	…
//	broker := inboxtest.NewBroker()
//	consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Fault: inboxtest.DeliverTwice}, books, inbox.ConsumerConfig{})
//	relay, err := outbox.NewRelay(store, broker, outbox.RelayConfig{})
//
// What goes wrong between a consumer and its broker is scripted: Queue.Fault is asked at every step
// whether it works, fails before or after it took effect, hangs, or loses the session. DeliverTwice
// repeats every message. A handler that is right under it is idempotent.
//
// Prove runs a handler of yours on a real Postgres instead, once for each place at which it can be
// interrupted.
//
// All waiting is done by package time, so tests run in a testing/synctest bubble without
// waiting in fact.
//
// # Limits
//
// What is in memory is gone with the process. Messages are routed by their names alone.
package inboxtest
