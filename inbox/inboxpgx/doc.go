// Package inboxpgx makes the effect of a message happen once: the message's id is recorded
// in the handler's own Postgres transaction.
//
//	books, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
//	err = inboxpgx.Handle(books, "order.placed", func(ctx context.Context, tx pgx.Tx, o OrderPlaced) error { … })
//
// A Store is the inbox.Processor of one consumer. It owns five tables, which Migrate creates: the
// entries; the ledger, in which the consumer notes what became of messages that did not go
// through at their first delivery; the ordering keys that are stopped by a dead letter, and their
// messages (see parked.go); and the consumers that operators have paused. While the consumer runs,
// entries and notes that are older than the retention are deleted; messages that wait are kept, and so
// are their entries.
//
// For each message the Store begins a transaction through a txretry.Transactor, runs
//
//	INSERT INTO holdfast_inbox … ON CONFLICT DO NOTHING
//
// in one round trip with BEGIN, then the handler, and commits. When no row was inserted the
// transaction is rolled back, and the Store looks for the entry: the message counts as done if that is
// there. If not, a trigger or a policy has dropped the row. The error is then ErrIgnored, and the message
// is not done. The same holds for every other change of the Store's tables.
//
// When the handler fails its entry is rolled back with its other writes, so a retry runs it again.
//
// The head of parked.go describes keys that a dead letter stops.
//
// # Guarantees
//
//   - What the handler writes through tx takes effect once per consumer and message id,
//     for as long as the entry is kept (Config.Retention, 8 days, and while a copy is parked),
//     whatever crashes when and however many copies arrive at once. That covers messages
//     written to an outbox in tx.
//   - Two copies at the same time: the second one waits for the first. At SERIALIZABLE it
//     then fails with 40001, is tried again and finds the entry. No read precedes the
//     INSERT: it would make different new ids conflict with each other.
//   - A message is done only after COMMIT was confirmed. When the answer to COMMIT was lost
//     the message is given back, and the entry decides at its next delivery.
//
// The handler may run several times within one delivery, when its transaction is retried,
// so it must have no effects but through tx and txretry.AfterCommit. HandlePrepared gives
// slow calls to other systems their place before the transaction; they happen at every
// delivery, that of a copy too, and must bear repetition.
//
// # Batches
//
// Given several messages (inbox.ConsumerConfig.Batch) the Store records them all by one
// INSERT and runs their handlers one after the other in one transaction: one COMMIT, and one
// round trip for each statement of a handler, instead of three for each message. HandleBatch
// registers a handler that takes them all in one call. A message still succeeds or fails
// alone: when a handler fails, the transaction is run again with a savepoint around each
// one, and what fails there is rolled back to it. When it is the transaction that fails (a
// deferred constraint, conflicts without end), each half gets one of its own, down to single
// messages. Each message has the consumer's HandlerTimeout for its Prepare step and for its call, so that
// one that hangs fails alone; HandleBatch has as many times that as it takes messages. When the time of
// the whole batch is over, no message is to blame: each comes again alone, uncounted, at once.
// Middleware begins for all messages, in their order, then their Waiters and Prepare steps run at
// once, and then the transaction begins; see inbox.Middleware. Locks and conflicts concern the whole
// transaction: handlers that contend for the same rows want small batches.
//
// # Whose failure it is
//
// A database that cannot be reached, that breaks off the connection, refuses new ones, is
// read-only or out of resources fails no message: the error is inbox.Unavailable. So is an
// unknown outcome of COMMIT. Waiting in vain, up to a deadline, for a connection or for a copy
// that is being processed elsewhere is inbox.Postpone. A *txretry.LockTimeoutError of the
// handler's own locks is inbox.Recoverable, so that it neither costs the message its retries nor stops the others.
// All other errors are the handler's and keep their markers: also where it ended the
// transaction itself, or kept it open for longer than the server's timeouts allow.
//
// The consumer distinguishes an outage from a handler that breaks its connection every time, by a
// statement or by a shorter context of its own whose error it hides: see inbox/inboxamqp/session.go.
package inboxpgx
