// Package outbox publishes messages that were stored in the same database
// transaction as the change they announce.
//
//	// in the business transaction
//	m, err := outbox.NewMessage("order.placed", order)
//	m.Key = order.ID
//	err = store.Write(ctx, tx, m)
//
//	// beside it, in this process or another
//	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{})
//	err = relay.Run(ctx)
//
// The store is outboxpgx.Store, or outboxtest.Store in memory. The publisher is that of
// outboxamqp, outboxredis or outboxtest, or a [PublisherFunc] for any other destination.
//
// # Promises
//
//   - A message of a transaction that rolled back is never published. A committed
//     message is published at least once: a relay that dies between the confirm and
//     the mark publishes again. Consumers recognise the copy by Message.ID.
//   - Messages with the same Key are published in stored order: the next one leaves
//     after the confirm of the one before, because a broker may reject a message after
//     it has accepted the next. A failed message delays only its key. A dead letter lets
//     its key go on.
//   - Messages without a Key have no order and are sent all at once.
//   - A broker or database that is down costs no message an attempt. The relay pauses
//     for 2 s at most and resumes, at once when a publisher reconnects
//     ([driver.Reconnecting]).
//   - A message that cannot be published is rejected where it is written: see [Prepare].
//   - Any number of relays may run side by side, join and leave.
//
// # Failures
//
// A [driver.Publisher] gives each failure a [driver.Class]. Retryable and Unroutable
// failures cost an attempt; after the last attempt the message is a dead letter. A
// Permanent failure makes it a dead letter at once. Unavailable and Blocked concern
// the transport: unconfirmed messages are released and the transport pauses, while
// others go on. [RelayConfig].ByName has a [RetryPolicy] per name.
//
// # Lanes and lost relays
//
// The key of a message chooses one of 16 [driver.Lanes]. A relay leases lanes for a
// batch, with a fencing token each, so a relay that wakes up late changes nothing. The
// lanes of a killed relay are free within 10 s. Up to three batches of a relay are in
// flight.
//
// If a relay is lost, one of its messages may be the cause. Such messages are published
// in ever smaller batches and beside nothing else, until one is left. A message that
// was lost alone with [RelayConfig].MaxCrashes relays in a row becomes a
// [driver.Quarantined] dead letter.
//
// # Metrics
//
// Attributes are the transport, a class or a state. [Relay.Stats] has the same figures.
//
//	holdfast.outbox.lag                   from storing a message to its confirm
//	holdfast.outbox.confirm.duration      from sending it to its confirm
//	holdfast.outbox.batch.duration        publishing and settling one batch
//	holdfast.outbox.published, failed, given_back, stale_leases
//	holdfast.outbox.depth                 ready, parked and dead messages
//	holdfast.outbox.oldest.age            of the oldest ready or failed message
//	holdfast.outbox.transport.state       closed, paused or probing
//	holdfast.outbox.window.fill           of publishers that report it
//
// The last four are gauges of a running relay; the store is asked every 5 s at most.
// Relays of several stores in one process need a MeterProvider each.
//
// # Limits
//
// Order within a key is the order of the transactions that write it: lock a row that
// the key names. If the messages of a key go to several transports, a paused one does
// not stop the others. A transport that does not answer delays the messages of its
// batch's lanes for PublishTimeout at each try. A message that makes the broker silent
// counts as an outage and is retried forever.
package outbox
