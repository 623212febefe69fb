// Package txretry runs functions in Postgres transactions and retries them when
// they conflict with another transaction.
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
// # Retries
//
// SQLSTATE 40001 (serialization_failure), 40P01 (deadlock_detected) and 55P03
// (lock_not_available), at a statement or at COMMIT, also if fn wraps or hides the
// server's error. Everything else returns at once. Options.NoWait and
// Options.RetryConstraints change this for one call.
//
// There are 6 attempts. The delay after failed attempt n is
// min(1000ms, U(0.5, 1.5) × 50ms × 2^n). It holds neither a connection nor a lock.
// With Options.SerialKey callers queue in the process, and the delay is
// min(1000ms, U(0.5, 1.5) × 1ms × 4^n). After the last attempt Do returns
// *[LockTimeoutError]. With Config.RetryBudget, Do also returns it for calls that it does not
// start while too many attempts need a retry.
//
// If the database cannot work, Do returns *[UnavailableError]. The call is retried only if
// the connection was lost before COMMIT was sent, or at BEGIN.
//
// # Three outcomes
//
// If Do returns nil, the transaction is committed. If it returns an error, the transaction is
// rolled back, with one exception: *[CommitUnknownError] means that the connection was lost while
// COMMIT was sent. Then nothing is retried, and no [AfterCommit] function runs. Only a reply of
// the server counts: pgconn.SafeToRetry reports true for some applied COMMITs. The caller's context
// does not interrupt COMMIT. Config.XactStatus and Options.Witness find the outcome.
//
// # A server that does not answer
//
// Every wait has a time limit: 30 s for a connection, 2 s for BEGIN (then another
// connection is used), 9 s for a statement or the next part of its result (see
// Config.StatementTimeout; at least 1 s more than the lock timeout), the same for
// COMMIT (see Config.CommitTimeout) and 5 s for ROLLBACK. The time that fn takes between statements does not
// count. A connection that did not answer is removed from the pool, and idle connections are tested.
// [PreparePool] sets time limits for the pool. The server ends a transaction that
// sends nothing for 30 s (Config.IdleTimeout).
//
// Statements on tx.Conn() and LargeObjects have no such time limit.
//
// # Rules for fn
//
//   - It may run several times. It has no effects except through tx, [AtCommit] and
//     [AfterCommit], and it resets captured variables each time.
//   - It does not end the transaction: Commit and Rollback on tx return [ErrManaged].
//     tx.Begin starts a savepoint. When the savepoint rolls back, its registered
//     statements and functions are dropped.
//   - It does not call Do on the same database with its context ([ErrNested]), unless
//     Options.Savepoint is set.
//   - It uses tx, and everything it gets from tx, only inside fn.
//
// # Limits
//
// lock_timeout limits each wait for a lock, not their sum. SERIALIZABLE protects only
// from other SERIALIZABLE transactions. Work with SKIP LOCKED needs
// Options{Isolation: pgx.ReadCommitted}, because skipped rows count as read. After
// the first call of tx.Conn no statement is deferred to COMMIT. A hot standby
// accepts only ReadOnly calls up to REPEATABLE READ; others return [ErrStandby].
//
// If the table of predicate locks is full, Do returns *[UnavailableError] with the hint to raise
// max_pred_locks_per_transaction. [Manager.Check] reports a low setting in advance. PgBouncer in
// transaction mode needs version 1.21 for prepared statements, and does not work with DescribeExec.
//
// OpenTelemetry receives a span txretry.Do, and the metrics holdfast.txretry.duration, attempts,
// phase.duration, failures, refused and budget.exceeded.
package txretry
