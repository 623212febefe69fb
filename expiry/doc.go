// Package expiry expires rows whose deadline has passed: reservations, holds,
// invitations. It changes their state and announces it in one transaction, soon
// after the deadline and once, whatever fails in between.
//
// A [Sweeper] works on a store: that of expirypgx for a Postgres table of yours, or
// that of expirytest for rows in memory. A sweep takes batches of rows that are
// due, each in its own transaction, until a batch is short. Sweeps happen
//
//   - at the start of [Sweeper.Run], so that downtime loses nothing;
//   - when the next row falls due: after each sweep the store is asked for the
//     earliest deadline, which sets the timer;
//   - on the schedule (*/30 * * * * UTC by default), whatever the store says;
//   - when the store's Due says that a row was made that falls due earlier.
//
// A missed activation costs nothing: what is due then is due still. While
// nothing is due, a sweeper asks less than one query a minute: an hour is 40
// looks and two sweeps.
//
// # What is promised
//
// Each row expires once, also with many sweepers side by side and none of them
// in the lead: they pass over rows that another transaction has locked, and the
// change itself repeats that the row is still active and still due. A
// confirmation or an extension that locks the row first therefore wins. What is
// announced commits together with the change, and under [EventID] carries the
// same id if it is ever repeated.
//
// A row that makes its batch fail does not stop the others: the batch is set
// aside until they are done, then halved until the row is alone, and the row is
// left in quarantine for a while, after which it is tried by itself. A panic of
// a callback is such a failure. So is running into
// [SweeperConfig].BatchTimeout: then the search goes on over several sweeps, so
// that rows which fall due meanwhile wait for one timeout at most. The row is
// found guilty only if others have expired since; otherwise the whole server may
// stall. A row alone that fails by what is no row's fault, such as a full disk, a
// conflict or an error of the schema, is passed by and tried again soon. More than
// 1,000 such rows look like an outage, and slow down the search for them and the
// rows behind them.
//
// A fault of the store costs one line of log in 10 s, and a pause of 5 s at most,
// which ends when a wake-up shows that the store works.
//
// Only the store's clock decides what is due. How far this host's is off is
// measured, and logged from a minute on.
//
// # What is not
//
// A sweep comes after the deadline, not at it. Whoever reads or settles a row
// must treat it as expired from the deadline on. These statements cannot race a
// sweep: whichever locks the row first wins, and the other then changes nothing.
//
//	UPDATE holds SET status = 'confirmed'
//	WHERE id = $1 AND status = 'held' AND expires_at > now();
//
//	UPDATE holds SET expires_at = now() + interval '15 minutes'
//	WHERE id = $1 AND status = 'held' AND expires_at > now();
//
// Where no row was changed it was too late, or somebody has settled it before.
// now() is the start of the transaction: run them first in it, or write
// clock_timestamp(), or a wait for a lock may let a row be confirmed that fell due
// meanwhile. A row that is never to expire has the deadline 'infinity', not NULL:
// a sweeper does not start while an active row has none, and one that loses its
// deadline later is passed over, counted and logged.
//
// A wake-up may be lost: the process ends right after its commit, say. The row is
// then found at the next look, up to [SweeperConfig].PollInterval later. The
// quarantine is kept in memory: after a restart a bad row is tried again, and each
// process finds it for itself.
package expiry
