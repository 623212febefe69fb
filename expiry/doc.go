// Package expiry expires rows whose deadline has passed: reservations, holds,
// invitations. It changes their state and announces it in one transaction, soon
// after the deadline and once, whatever fails in between.
//
// A [Sweeper] works on a [Store]: expirypgx.Store for a Postgres table of yours,
// expirytest.Store for rows in memory. A sweep takes batches of rows that are
// due, each in its own transaction, until a batch is short. Sweeps happen
//
//   - at the start of [Sweeper.Run], so that downtime loses nothing;
//   - when the next row falls due: after each sweep the store is asked for the
//     earliest deadline, which sets the timer;
//   - on the schedule (*/30 * * * * UTC by default), whatever the store says;
//   - when [Sweeper.Wake] says that rows were made, if one of them is due.
//
// # What is promised
//
// Each row expires once, also with many sweepers side by side: they pass over
// rows that another transaction has locked, and the change itself repeats that
// the row is still active and still due. A confirmation or an extension that
// locks the row first therefore wins. What is announced commits together with
// the change, and under [EventID] carries the same id if it is ever repeated.
//
// A row that makes its batch fail does not stop the others: the batch is halved
// until the row is alone, and the row is left in quarantine for a while.
//
// # What is not
//
// A sweep comes after the deadline, not at it. Whoever reads or confirms a row
// must treat it as expired from the deadline on:
//
//	UPDATE holds SET status = 'confirmed'
//	WHERE id = $1 AND status = 'held' AND expires_at > now()
//
// Rows made by other processes are found at the next look, a minute apart,
// unless those processes can reach Wake. So a hold shorter than that may expire
// up to [SweeperConfig].Recheck late. The quarantine is kept in memory: after a
// restart a bad row is tried again.
package expiry
