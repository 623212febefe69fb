// Package inbox consumes messages so that each takes effect once, a bad one stops no other,
// and none is lost on any fault.
//
// # The parts
//
// A Message is what arrived. A Processor does the work of messages and says for each one
// whether it is done. A consumer (package inboxamqp, inboxredis for Redis Streams, or inboxtest in tests) receives
// messages, hands them to the processor and settles them by its answer: a message is
// acknowledged only after its effect is durable.
//
// Mux is the Processor that picks a handler by the message's name and decodes the JSON
// body into the handler's type:
//
//	mux := inbox.NewMux()
//	err := inbox.Handle(mux, "order.placed", func(ctx context.Context, o OrderPlaced) error { … })
//
// # Taking effect once
//
// Brokers deliver at least once. There are three ways to deal with the copies:
//
//   - Package inboxpgx records the message's id in the handler's own Postgres
//     transaction. The effect and the entry commit together or not at all, so an effect
//     inside that transaction happens once, whatever crashes when.
//   - Package inboxredis claims the id in Redis around a handler. That keeps copies apart
//     while Redis keeps its data, but effect and entry are not atomic: a crash between them
//     runs the handler again. It is best effort, for handlers that bear a rare repetition.
//   - Both: inboxredis in front of inboxpgx believes Redis only when it says that a message is
//     done; everything else is for inboxpgx. It saves transactions where many copies come.
//   - A bare Mux does nothing: each delivery runs its handler.
//
// All of them recognise a message by its id, which must be a UUID v7. Entries are kept for
// 8 days; a copy that arrives later takes effect again.
//
// # When a handler fails
//
// A handler's error decides by its marker:
//
//   - none: RetryPolicy, by default 6 attempts, the retries after 1, 2, 4, 8 and 16 seconds, ±20 %;
//     then a dead letter of class default;
//   - Recoverable and RetryAfter: retried until older than RetryPolicy.MaxAge, without using
//     up the attempts of the others;
//   - Unrecoverable: a dead letter of class unrecoverable at once;
//   - Invalid: a dead letter of class validation at once. A missing or wrong id, an unknown name and an
//     undecodable body are this, too: such messages are never passed over silently. Another
//     policy is a Mux.Fallback, a middleware, or ConsumerConfig.DeriveID;
//   - Classed: a dead letter of that class when it is given up;
//   - Postpone and Unavailable: not the message's failure; it comes again, uncounted.
//
// A panic counts as an unmarked error. While a message waits for its retry the messages
// behind it go on, so retries change the order of messages, unless they are ordered.
//
// # Order
//
// With ConsumerConfig.Ordered the messages of one ordering key are processed one at a time and in
// order, retries included: the key waits behind its failing message, others go on. When that
// becomes a dead letter its key goes on, or, with ConsumerConfig.ParkKeys, is parked: each later message
// is kept in the processor's store, and the broker's queue stays short. Once the dead letter
// is replayed or removed by DeadLetters the key resumes, within a few seconds: first the message
// itself, if it was replayed, then those that were kept, in their order, then what the queue has.
//
// With ConsumerConfig.MaxParked messages the place is full: what else arrives for keys that wait
// stays in hand until it fills the window, and the consumer pauses rather than lose or reorder it.
//
// # Limits
//
// The policy counts the attempts that the message carries, which is as sure as its
// transport: a crash between the retry and the acknowledgement of the original leaves two of
// them, and a handler that ends the process (out of memory, a panic in a goroutine of its
// own) is never counted. A processor with a ledger, as inboxpgx is, covers both: it knows
// leftovers, and gives up a message (class quarantined) during which the process has ended
// several times.
//
// A message may come again for as long as its retries take, the time it lies in the dead
// letters, and its replay take. What a consumer remembers must outlast that; see Replay.
package inbox
