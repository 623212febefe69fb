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
// The store is outboxpgx.Store, or outboxtest.Store in memory. The publisher comes from
// outboxamqp, outboxredis or outboxtest, or is a [PublisherFunc] for any other destination.
//
// # Promises
//
//   - A message of a transaction that rolled back is never published. A committed
//     message is published at least once. If a relay dies after the confirm and before
//     it settles the message, another relay publishes it again. Consumers recognise the
//     duplicate by Message.ID.
//   - Messages with the same Key are published in stored order. Each waits for the
//     confirm of the previous one, because a broker may reject a message after it has
//     accepted the next. A failed message delays only its key. After a dead letter its
//     key continues.
//   - Messages without a Key have no order and are all sent at once.
//   - A broker or database that is down costs no message an attempt. The relay pauses
//     for at most 2 s. It resumes at once when a publisher reconnects
//     ([driver.Reconnecting]).
//   - A message that cannot be published is rejected when it is written: see [Prepare].
//   - Any number of relays may run side by side, start and stop.
//
// # Failures
//
// A [driver.Publisher] assigns a [driver.Class] to each failure. Retryable and Unroutable
// failures cost an attempt; after the last attempt the message becomes a dead letter. After a
// Permanent failure it becomes a dead letter immediately. Unavailable and Blocked concern
// the transport: its unconfirmed messages are released and the transport pauses, while
// other transports continue. [RelayConfig].ByName has a [RetryPolicy] per name.
//
// # Lanes and lost relays
//
// The key of a message selects one of 16 [driver.Lanes]. A relay leases lanes for a
// batch. Each lease has a fencing token, so a relay that wakes up too late changes nothing.
// Another relay takes over the lanes of a killed relay within LeaseTTL, 6 s by default. A
// relay has up to three batches in flight.
//
// If a relay is lost, one of its messages may be the cause. Such messages are suspects.
// They are published in ever smaller batches, with no other messages in flight, until one
// is left. If MaxCrashes relays in a row are lost with that message alone, it becomes a
// [driver.Quarantined] dead letter ([RelayConfig].MaxCrashes).
//
// # Metrics
//
// Attributes are the outbox ([driver.Named]), the transport, a class or a state. [Relay.Stats] has the same figures.
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
// The last four are gauges of a running relay. It reads the store for them at most every 5 s.
// Relays in one process whose outboxes have the same name need separate MeterProviders.
//
// # Limits
//
// Order within a key is the order of the transactions that write it: lock a row that
// the key identifies. If the messages of a key go to several transports, a paused one does
// not stop the others. A transport that does not answer delays the messages of its
// batch's lanes for PublishTimeout at each attempt. If a message makes the broker stop
// answering, it counts as an outage, and the relay retries the message forever.
package outbox
