// Package inboxtest has the fakes of an inbox: Broker, a queue in memory with redelivery,
// retry delays and dead letters that drives any inbox.Processor, and Dedup, the dedup
// entries for transactions of txretrytest, and Ledger. With both, the handlers of a real
// inboxpgx.Processor run without any server, in a test or in a demonstration.
//
//	manager := txretrytest.New(txretrytest.Config{})
//	p, err := inboxpgx.NewProcessor(manager, inboxpgx.Config{Consumer: "billing", Dedup: inboxtest.NewDedup()})
//	…
//	broker, err := inboxtest.NewBroker(p, inboxtest.Config{DeliverTwice: true})
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
// What is in memory is gone with the process. There is one queue, with no routing before it.
package inboxtest
