// Package outbox publishes messages that were stored in the same database
// transaction as the change they announce: published only if committed, and at
// least once.
//
// A [Message] is written by a writer (outboxpgx.Store, or outboxtest.Store in
// memory) inside the caller's transaction. A [Relay] takes it from a [driver.Source]
// afterwards and gives it to the [driver.Publisher] of its transport: RabbitMQ
// (outboxamqp), Redis Streams (outboxredis), or memory (outboxtest).
//
//	// in the business transaction
//	m, err := outbox.NewMessage("order.placed", order)
//	m.Key = order.ID
//	err = writer.Write(ctx, tx, m)
//
//	// beside it, in this process or in another
//	relay, err := outbox.NewRelay(source, publisher, outbox.RelayConfig{})
//	err = relay.Run(ctx)
//
// # What is promised
//
//   - A message of a transaction that rolled back is never published; one that
//     committed is published at least once. A relay that dies between the confirm
//     and the mark publishes again: consumers tell duplicates by Message.ID.
//   - Messages with the same Key are published in stored order: the next one
//     leaves after the confirm of the one before. A failed message holds back its
//     own key until its next attempt, and nothing else. A message that becomes a
//     dead letter lets its key go on. So a key has one message in flight, and its
//     rate is that of round trips: a broker can refuse a message (a nack, a full
//     queue, no route) after it has accepted the one behind it, and nothing takes
//     that one back.
//   - Messages without a Key have no order and are in flight all at once.
//   - A broker or a database that is down costs no message an attempt. The relay
//     pauses, with growing jittered delays of 2 s at most, and resumes by itself,
//     at once when a publisher has its connection back ([driver.Reconnecting]).
//   - What could not be published is refused where it is written: see [Prepare].
//   - Any number of relays may run side by side, join and leave.
//
// # Failures
//
// A [driver.Publisher] gives each failure a [driver.Class]. Retryable and Unroutable failures
// cost an attempt; the message waits longer after each one, and is a dead letter
// after the last. A Permanent failure makes it a dead letter at once. Unavailable
// and Blocked say something about the transport, not the message: everything
// that is not confirmed is given back, and the transport is left alone for a
// while, beside the others that go on. [RelayConfig].ByName has a [RetryPolicy] of its
// own for the messages of a name.
//
// # What a relay tells
//
// [Relay.Stats] is the state of the store and of each transport. The same and more
// are metrics, with the name of the transport, a class or a state as their only
// attributes:
//
//	holdfast.outbox.lag                   from storing a message to its confirm
//	holdfast.outbox.confirm.duration      from giving it to the transport to its confirm
//	holdfast.outbox.batch.duration        publishing and settling of one batch
//	holdfast.outbox.published, failed, given_back, stale_leases
//	holdfast.outbox.depth                 messages that are ready, parked and dead
//	holdfast.outbox.oldest.age            of the oldest that is ready or failed
//	holdfast.outbox.transport.state       closed, paused or probing
//	holdfast.outbox.window.fill           of publishers that tell it
//
// The last four are gauges, collected while Run runs; the store is asked at most
// every 5 s. In an outage the counters stand still: watch the state and the oldest
// age. Ages begin when a message was stored, so NotBefore and a retry of a dead
// letter make them long; and where the clocks of store and relay differ, they are
// wrong by that. Relays of several stores in one process overwrite each other's
// gauges, unless each has a MeterProvider of its own.
//
// # Lanes
//
// A store has 16 [driver.Lanes], and a message's key chooses its lane. A relay leases
// whole lanes for a batch; every lease has a fencing token, so that a relay that
// slept through its lease can change nothing when it wakes up. See [driver.Source].
// Leases are short, so that the lanes of a relay that was killed are free within
// 10 s; a batch that takes long renews its own. A relay that finds lanes leased looks
// again when the first lease ends. One that settles a batch looks again only if the
// store tells of more in its lanes, or if the batch was not published whole.
// Up to three batches of a relay, each with lanes of its own, are in hand at
// once, so that the next is claimed and the last settled while one is published.
//
// # Relays that are lost
//
// A relay that neither settles nor renews its lease was killed, paused or cut off.
// One of its messages may be the cause, so those it can have had are under
// suspicion: they are given to a relay only while it has nothing else in hand,
// in ever smaller batches, until the rest is published and one message is left.
// One that was lost alone with [RelayConfig].MaxCrashes relays in a row is not
// published any more: it becomes a [driver.Quarantined] dead letter, and its key goes
// on. Nothing else costs a message anything but time.
//
// # Limits
//
// Order within a key holds per store: the transactions that write a key must be
// ordered themselves, by a lock on what the key names. If a key's messages go to
// several transports and one of these is paused, the others' go on. One key
// carries at most one message per round trip to the broker. A batch ends with
// its slowest message: a transport that is silent, rather than down, holds up
// the other messages of its batch's lanes for PublishTimeout whenever it is
// tried. A message
// that makes the broker silent, rather than refuse it, counts as an outage and
// is tried for ever. Relays that share a process are lost together, so that each
// may blame a message of its own for the other's.
package outbox
