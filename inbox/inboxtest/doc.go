// Package inboxtest has the fakes of an inbox: Broker, queues in memory with redelivery, retry
// delays and dead letters; Consumer, which drives any inbox.Processor on one of them; and New, an
// inboxpgx.Store with its entries in memory. With them the handlers and the relay of production
// run without any server, in a test or in a demonstration.
//
//	manager := txretrytest.New(txretrytest.Config{})
//	books, err := inboxtest.New(manager, "billing", inboxpgx.Config{})
//	…
//	broker := inboxtest.NewBroker()
//	consumer, err := inboxtest.NewConsumer(broker, "billing", books, inboxtest.Config{DeliverTwice: true})
//	relay, err := outbox.NewRelay(store, broker, outbox.RelayConfig{})
//
// Deliveries that end badly are scripted: DeliverTwice repeats every message, and Crash
// makes the consumer "die" before a message was processed or before it was acknowledged.
// A handler that is right under both is idempotent.
//
// All waiting is done by package time, so tests run in a testing/synctest bubble without
// waiting in fact.
//
// # Limits
//
// What is in memory is gone with the process. Messages are routed by their names alone.
package inboxtest
