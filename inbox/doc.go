// Package inbox consumes messages so that each takes effect once, a bad one does not stop the others, and no
// fault loses one.
//
// # The parts
//
// A Message is a message as received. A Processor does the work of messages and returns a result for each
// one. A consumer (package inboxamqp, inboxredis for Redis Streams, or inboxtest in tests) receives messages,
// passes them to the processor and settles them by their results. A message is acknowledged only after its
// effect is durable.
//
// Mux is the Processor that selects a handler by the message's name and decodes the JSON body into the
// handler's type:
//
//	mux := inbox.NewMux()
//	err := inbox.Handle(mux, "order.placed", func(ctx context.Context, o OrderPlaced) error { … })
//
// # Taking effect once
//
// Brokers deliver at least once. There are several ways to deal with the copies:
//
//   - Package inboxpgx records the message's id in the handler's own Postgres transaction. The effect and the
//     entry commit together or not at all. So an effect inside that transaction happens once, even after a
//     crash.
//   - Package inboxredis claims the id in Redis around a handler. This separates copies while Redis keeps its
//     data, but effect and entry are not atomic: a crash between them runs the handler again. Use it for
//     handlers that tolerate a rare repetition.
//   - Both: inboxredis in front of inboxpgx trusts Redis only if Redis has the message as done; inboxpgx
//     decides all other cases. It saves transactions if many copies arrive.
//   - A bare Mux does nothing: each delivery runs its handler.
//
// All of them recognise a message by its id, which must be a UUID v7. Entries are kept for 8 days; a copy
// that arrives later takes effect again.
//
// # When a handler fails
//
// The marker of a handler's error decides:
//
//   - none: RetryPolicy, by default 6 attempts, the retries after 1, 2, 4, 8 and 16 seconds, ±20 %; then a
//     dead letter of class default;
//   - Recoverable and RetryAfter: retried until older than RetryPolicy.MaxAge, without using up the attempts
//     of unmarked errors;
//   - Unrecoverable: a dead letter of class unrecoverable at once;
//   - Invalid: a dead letter of class validation at once. A missing or wrong id, an unknown name and an
//     undecodable body count as Invalid: such messages are never skipped silently. To change that, use
//     Mux.Fallback, a middleware, or ConsumerConfig.DeriveID;
//   - Classed: a dead letter of that class when it is given up;
//   - Postpone and Unavailable: not the message's failure; it is redelivered uncounted.
//
// A panic counts as an unmarked error. While a message waits for its retry, the messages behind it continue.
// So retries change the order of messages, unless they are ordered.
//
// # Order
//
// With ConsumerConfig.Ordered the messages of one ordering key are processed one at a time and in order,
// retries included. A key waits behind its failing message, and other keys continue. When the message becomes
// a dead letter, its key continues or, with ConsumerConfig.ParkKeys, is parked. The processor then stores
// each later message of the key, and the broker's queue stays short. After the dead letter is replayed or
// removed by DeadLetters, the key resumes within a few seconds: first the replayed message, then the stored
// ones in their order, then the queue.
//
// ConsumerConfig.MaxParked bounds the stored messages. At the limit, further messages for parked keys stay in
// flight. When they fill the prefetch window, the consumer pauses, so that it neither loses nor reorders
// them.
//
// # Limits
//
// The policy counts the attempts recorded in the message, which is as reliable as its transport. A crash
// between the retry and the acknowledgement of the original leaves two copies. A handler that ends the
// process (out of memory, a panic in a goroutine of its own) is never counted. A processor with a ledger,
// such as inboxpgx, covers both: it detects the extra copies, and quarantines a message during which the
// process has ended several times.
//
// A message may return for as long as its retries take, plus its time in the dead letters, plus its replay. A
// consumer's entries must be kept longer than that; see Replay.
package inbox
