// Package txretrytest is an in-memory replacement for txretry, for unit tests and
// demonstrations without a database.
//
// [Manager] has the same attempts, delays, errors and handle rules as
// txretry.Manager, because it uses the same code. Its transactions run one at a
// time: serializable. Its handle runs no SQL: a statement returns an error that
// quotes it. Instead the fakes of the other packages, and yours, change their
// memory through [Effect]. The change is immediate, visible inside the
// transaction, and undone if the transaction or the savepoint around it rolls back.
//
//	type Counter struct{ mu sync.Mutex; n int }
//
//	func (c *Counter) Add(ctx context.Context, tx pgx.Tx, d int) error {
//		return txretrytest.Effect(tx, func() { c.add(d) }, func() { c.add(-d) })
//	}
//
// A script of [Fault] makes attempts fail like a database would: at BEGIN, at any
// statement, at the end of fn, so that all of it runs again, at COMMIT, or with
// the reply of COMMIT lost.
//
// On a real database, [Prove] and its counterparts in the other fakes interrupt your
// code once at each possible place; see [Proof].
//
// # Limits
//
// There is no isolation from readers outside a transaction: they see effects
// before the commit. Conn returns nil, and the methods of LargeObjects panic.
// txretry.AtCommit accepts statements, and COMMIT then fails; [EffectAtCommit] is
// its counterpart here.
//
// All waiting uses channels and timers, so a test may run in a testing/synctest
// bubble; create the Manager inside the bubble then.
package txretrytest
