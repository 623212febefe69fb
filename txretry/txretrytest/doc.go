// Package txretrytest is an in-memory stand-in for txretry, for unit tests and
// demonstrations without a database.
//
// [Manager] makes the same attempts, delays, errors and handle rules as
// txretry.Manager, since the same code does it, on transactions that run one at
// a time: serializable. Its handle runs no SQL (a statement is answered with an
// error that quotes it). Instead the fakes of the other packages, and yours,
// change their memory through [Effect]: at once, visible inside the
// transaction, undone if the transaction or the savepoint around it rolls back.
//
//	type Counter struct{ mu sync.Mutex; n int }
//
//	func (c *Counter) Add(ctx context.Context, tx pgx.Tx, d int) error {
//		return txretrytest.Effect(tx, func() { c.add(d) }, func() { c.add(-d) })
//	}
//
// A script of [Fault] makes attempts fail as a database would: at the
// beginning, at any statement, at the end of fn, so that all of it runs again, at
// COMMIT, or with the reply of COMMIT lost.
//
// On a real database [Prove], and its like in the other fakes, run your code once
// for each place at which it can be interrupted; see [Proof].
//
// # Limits
//
// There is no isolation from readers outside a transaction: they see effects
// before the commit. Conn returns nil, and the methods of LargeObjects panic.
// txretry.AtCommit accepts statements, and COMMIT then fails; [EffectAtCommit] is
// its counterpart here.
//
// All waiting is done on channels and timers, so that a test may run in a
// testing/synctest bubble; create the Manager inside the bubble then.
package txretrytest
