// Package expiry expires rows whose deadline has passed: reservations, holds, invitations. It
// changes their status and announces the change in one transaction, soon after the deadline and
// exactly once, even after failures.
//
// A [Sweeper] works on a store: expirypgx for your Postgres table, or expirytest for rows in
// memory. A sweep takes batches of due rows, each in its own transaction, until a batch is short.
// Sweeps happen
//
//   - at the start of [Sweeper.Run], so that downtime loses nothing;
//   - when the next row falls due: after each sweep the sweeper asks the store for the earliest
//     deadline and sets a timer;
//   - on the schedule (*/30 * * * * UTC by default), even if no row is known to be due;
//   - when the store's Due announces a row with an earlier deadline.
//
// A missed activation does no harm, because due rows stay due. While no row is due, a sweeper sends
// less than one query a minute: 40 queries and two sweeps in an hour.
//
// # Guarantees
//
// Each row expires once, even with many concurrent sweepers. There is no leader: sweepers skip rows
// that another transaction has locked, and the UPDATE repeats the condition that the row is still
// active and due. So a confirmation or an extension that locks the row first wins. The message
// commits together with the change. With [EventID] it has the same id if it is ever repeated.
//
// A row that makes its batch fail does not stop the others. The batch is set aside until the others
// are done. Then it is halved until the row is alone, and the row goes to quarantine for a while,
// after which it is tried alone. A panic of a callback is such a failure, and so is a batch that
// exceeds [SweeperConfig].BatchTimeout. In that case the search continues over several sweeps, so
// that rows that fall due in the meantime wait for at most one timeout. The row goes to quarantine
// only if others have expired since then, because otherwise the whole server may be slow. If a
// single row fails by something that is rarely caused by a row, such as a full disk, a conflict or
// a schema error, it is skipped and tried again soon. More than 1,000 such rows look like an
// outage, and slow down the search for them and the rows behind them.
//
// A fault of the store costs one log line in 10 s, and a pause of at most 5 s. A wake-up that shows
// that the store works ends the pause.
//
// Only the store's clock decides which rows are due. The difference to this host's clock is
// measured, and logged if it is a minute or more.
//
// # Limits
//
// A sweep comes after the deadline, not exactly at it. Code that reads or settles a row must treat
// it as expired from the deadline on. These statements cannot race with a sweep: the one that locks
// the row first wins, and the other changes nothing.
//
//	UPDATE holds SET status = 'confirmed'
//	WHERE id = $1 AND status = 'held' AND expires_at > now();
//
//	UPDATE holds SET expires_at = now() + interval '15 minutes'
//	WHERE id = $1 AND status = 'held' AND expires_at > now();
//
// If no row was changed, it was too late, or another transaction has settled the row. now() is the
// start of the transaction: run these statements first in it, or write clock_timestamp(). Otherwise
// a wait for a lock may let a row be confirmed that fell due in the meantime. A row that must never
// expire has the deadline 'infinity', not NULL: a sweeper does not start while an active row has a
// NULL deadline. A row that loses its deadline later is skipped, counted and logged.
//
// A wake-up may be lost, for example if the process ends right after its commit. The next query
// finds the row, up to [SweeperConfig].PollInterval later. The quarantine is kept in memory: after
// a restart a bad row is tried again, and each process finds it separately.
package expiry
