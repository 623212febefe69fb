// Package txretry runs functions in Postgres transactions and retries them, as
// a whole, when they lose against a concurrent transaction.
//
// SERIALIZABLE transactions are correct without thought about interleavings, at
// a price: any of them may fail with a conflict and must be run again from the
// start. [Manager] does that. It begins each attempt with one message (isolation
// and timeouts included), runs fn with an explicit pgx.Tx, commits, and sorts
// the failures:
//
//	err := manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
//		var free int
//		if err := tx.QueryRow(ctx, "SELECT free FROM shows WHERE id = $1 FOR UPDATE", id).Scan(&free); err != nil {
//			return err
//		}
//		if free == 0 {
//			return ErrSoldOut // rolled back, returned as it is
//		}
//		_, err := tx.Exec(ctx, "UPDATE shows SET free = free - 1 WHERE id = $1", id)
//		return err
//	})
//
// # What is retried
//
// SQLSTATE 40001 (serialization_failure), 40P01 (deadlock_detected) and 55P03
// (lock_not_available), at a statement or at COMMIT, found anywhere in the tree
// of the error that fn returns. If that error has lost the server's (no %w), or
// fn returns nil although a statement failed, the server's own error decides.
// Nothing else is retried: a unique violation, a business error or a lost
// connection comes back at once. Options.NoWait and Options.RetryConstraints
// change that for one call.
//
// There are 6 attempts. After failed attempt n the delay is
// min(1000ms, U(0.5, 1.5) × 50ms × 2^n), during which neither a connection nor a
// lock is held. A delay that would outlast the context's deadline is not begun.
// When no attempt is left Do returns *[LockTimeoutError]: HTTP 503, code
// LOCK_TIMEOUT.
//
// A database that cannot work comes back as *[UnavailableError]: HTTP 503, code
// DATABASE_UNAVAILABLE. It is not retried, with two exceptions. A connection that
// is found lost at BEGIN is replaced by another one. A connection that is found
// lost before COMMIT was sent, or a COMMIT of a ReadOnly call that is not
// answered, makes a new attempt.
//
// Callers that contend for one row, such as the buyers of one event, can take
// turns instead: Options{SerialKey: "event:42"} queues them in this process,
// without a connection. Conflicts with other processes are still retried, after
// delays of min(1000ms, U(0.5, 1.5) × 1ms × 4^n), since the whole queue waits.
//
// # Three outcomes
//
// Do returning nil means committed. Any other return means rolled back, with one
// exception: *[CommitUnknownError] says that the connection was lost while
// COMMIT was on its way. Then nobody on this side knows, so nothing is retried
// and no [AfterCommit] function runs. Only a reply of the server counts as an
// answer; pgconn.SafeToRetry is not asked, for it calls some applied COMMITs safe
// to retry. COMMIT is not interrupted by the caller's context, so that a client
// that hangs up does not create that case.
//
// With Config.XactStatus the server is asked what became of such a COMMIT; with
// Options.Witness a row that the transaction would have left tells. What is found
// committed is success; what is found rolled back has done nothing, and is tried
// again.
//
// # A server that does not answer
//
// No wait for the server is endless, whatever the context. The bounds are 30 s
// for a connection, 2 s for the answer to BEGIN (then it is sent on another
// connection), 1 s more than the lock timeout, 9 s at least, for the answer to a
// statement or the next part of its result (see Config.StatementTimeout) and for
// COMMIT (then its outcome is unknown; see Config.CommitTimeout), and 5 s for
// ROLLBACK.
// The time that fn takes between its statements, between two rows, or in the
// source of a COPY, does not count.
//
// A connection on which the server was silent leaves the pool at once, and the
// idle ones are looked at, so that a pool whose connections were all cut off
// recovers in seconds; [PreparePool] bounds the pool's own waits. The server
// ends a transaction that sends nothing for 30 s (Config.IdleTimeout), so that a
// client that has vanished does not keep its locks. After a second without a
// statement COMMIT is preceded by a ping, so that a connection that was lost
// meanwhile makes no outcome unknown.
//
// What runs directly on tx.Conn() or through LargeObjects has no such bound.
//
// # Rules for fn
//
//   - It may run several times: no effects but through tx, [AtCommit] and
//     [AfterCommit], and captured variables are set anew each time.
//     (txretrytest.Prove finds where that is forgotten.)
//   - It does not end the transaction: Commit and Rollback on tx return
//     [ErrManaged]. tx.Begin starts a savepoint, whose handle has both; what is
//     registered while it is open is dropped when it rolls back. The same holds
//     for a savepoint of a statement.
//   - It does not call Do on the same database with the context it was given
//     ([ErrNested]): pass tx on, or set Options.Savepoint.
//   - What it obtains from tx, Conn and LargeObjects too, is used inside fn only.
//
// # Observation
//
// OpenTelemetry sees each call with its outcome, attempts and the time per phase:
// a span txretry.Do, and by operation the metrics holdfast.txretry.duration,
// holdfast.txretry.attempts, holdfast.txretry.phase.duration, and
// holdfast.txretry.failures by SQLSTATE. Without a listener they cost nothing.
//
// # Limits
//
// lock_timeout bounds each single wait for a lock, so an attempt with many locks
// can wait longer. SERIALIZABLE protects only against other SERIALIZABLE
// transactions. Queue-like work with SKIP LOCKED wants
// Options{Isolation: pgx.ReadCommitted}, since skipped rows count as read. A
// failure of a statement run directly on tx.Conn() or through LargeObjects is
// known to Do only if fn returns it. LargeObjects costs a round trip of its own.
// From the first call of tx.Conn on nothing is deferred to COMMIT, since statements
// on the connection are not seen.
//
// Postgres keeps predicate locks of SERIALIZABLE transactions as long as others
// overlap with them. Where its table is full, statements fail with 53200, "out of
// shared memory": an *[UnavailableError] with the hint of the server, which names
// max_pred_locks_per_transaction. (A hint at max_locks_per_transaction means the
// table of ordinary locks.) It is not retried, since the next attempt would need
// the same table. The setting's default of 64 serves transactions with 6 locks
// each, on average, beside one that is open for long: raise it. [Manager.Check]
// looks at it, and at what else is mis-set on the server and the pool.
//
// PgBouncer in transaction mode works with every pgx.QueryExecMode but two: the
// default one, whose prepared statements need PgBouncer 1.21 and its setting for
// them (else 42P05 or 26000), and DescribeExec, for what runs outside of
// transactions (26000). A hot standby takes only ReadOnly calls up to REPEATABLE
// READ, else [ErrStandby].
package txretry
