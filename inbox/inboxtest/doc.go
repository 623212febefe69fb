// Package inboxtest has the fakes of an inbox. Broker has queues in memory with redelivery, retry delays and
// dead letters. Consumer is the production consumer on one of these queues, for any inbox.Processor. New
// returns an inboxpgx.Store with its entries in memory. With them the handlers and the relay of production
// run without a server, in a test or in a demonstration.
//
//	manager := txretrytest.New(txretrytest.Config{})
//	billing, err := inboxtest.New(manager, "billing", inboxpgx.Config{})
//	…
//	broker := inboxtest.NewBroker()
//	consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Fault: inboxtest.DeliverTwice}, billing, inbox.ConsumerConfig{})
//	relay, err := outbox.NewRelay(store, broker, outbox.RelayConfig{})
//
// Faults between a consumer and its broker are scripted: Queue.Fault decides for every step whether it works,
// fails before or after it took effect, hangs, or loses the session. DeliverTwice repeats every message. A
// handler that stays correct with it is idempotent.
//
// Prove runs your handler on a real Postgres, once for each place at which it can be interrupted.
//
// All waits use package time, so tests in a testing/synctest bubble take no real time.
//
// # Limits
//
// Queues and entries are lost with the process. Messages are routed by their names only.
package inboxtest
