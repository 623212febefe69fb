// Package inboxpgx makes a message take effect once: it records the message's id in the handler's own
// Postgres transaction.
//
//	billing, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
//	err = inboxpgx.Handle(billing, "order.placed", func(ctx context.Context, tx pgx.Tx, o OrderPlaced) error { … })
//
// A Store is the inbox.Processor of one consumer. It owns five tables, which Migrate creates: the entries;
// the ledger, with the attempts of messages that failed at their first delivery; the ordering keys stopped by
// a dead letter, and their messages (see parked.go); and the paused consumers. While the consumer runs, it
// prunes entries and ledger rows older than the retention. Waiting messages and their entries are kept.
//
// For each message the Store begins a transaction through a txretry.Transactor, runs
//
//	INSERT INTO holdfast_inbox … ON CONFLICT DO NOTHING
//
// in one round trip with BEGIN, then the handler, and commits. If no row was inserted, it rolls back and
// looks for the entry. If the entry is there, the message counts as done. Otherwise a trigger or a policy has
// dropped the row: the error is ErrIgnored, and the message is not done. The same holds for every other
// change of the Store's tables.
//
// If the handler fails, its entry is rolled back with its other writes, so a retry runs it again.
//
// The comment at the top of parked.go describes keys stopped by a dead letter.
//
// # Guarantees
//
//   - All writes through tx take effect once per consumer and message id, for as long as the entry is kept
//     (Config.Retention, 8 days, and while a copy is parked), even after crashes and with many copies at
//     once. That includes messages written to an outbox in tx.
//   - Two copies at the same time: the second one waits for the first. At SERIALIZABLE it then fails with
//     40001, is retried and finds the entry. No read precedes the INSERT: a read would make different new ids
//     conflict with each other.
//   - A message is done only after COMMIT was confirmed. If the reply to COMMIT was lost, the message is
//     requeued, and the entry decides at its next delivery.
//
// The handler may run several times within one delivery, because its transaction may be retried. So it must
// have no effects except through tx and txretry.AfterCommit. HandlePrepared runs slow calls to other systems
// before the transaction. They run at every delivery, also of a copy, and must be repeatable.
//
// # Batches
//
// Given several messages (inbox.ConsumerConfig.Batch), the Store records them by one INSERT and runs their
// handlers one after the other in one transaction. That costs one COMMIT, and one round trip for each
// statement of a handler, instead of three for each message. HandleBatch registers a handler that takes all
// of them in one call.
//
// A message still succeeds or fails alone. If a handler fails, the transaction is repeated with a savepoint
// around each handler, and a failing one is rolled back to its savepoint. If the transaction itself fails (a
// deferred constraint, endless conflicts), each half gets one of its own, down to single messages. The
// Prepare step and the call of each message have the consumer's HandlerTimeout, so that one that hangs fails
// alone. HandleBatch has that time per message. If the time of the whole batch is over, no message is at
// fault: each is redelivered alone, uncounted, at once.
//
// Middleware begins for all messages, in their order. Then their Waiters and Prepare steps run at the same
// time, and then the transaction begins; see inbox.Middleware. Locks and conflicts concern the whole
// transaction: use small batches for handlers that contend for the same rows.
//
// # Classes of failures
//
// A database fails no message if it is unreachable, drops the connection, rejects new ones, is read-only or
// is out of resources: the error is inbox.Unavailable. So is an unknown outcome of COMMIT. If the deadline
// passes while a message waits for a connection, or for a copy that is being processed elsewhere, the error
// is inbox.Postpone. A *txretry.LockTimeoutError of the handler's own locks is inbox.Recoverable, so that it
// neither uses up the message's retries nor stops the others. All other errors are the handler's and keep
// their markers, even if the handler ended the transaction itself, or kept it open for longer than the
// server's timeouts allow.
//
// The consumer distinguishes an outage from a handler that breaks its connection every time, by a statement
// or by a shorter context whose error it hides: see inbox/engine/outage.go.
package inboxpgx
