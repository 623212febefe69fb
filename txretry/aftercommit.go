package txretry

import (
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// AfterCommit has fn run once after the transaction of tx has definitely
// committed: on the goroutine that called Do, before Do returns, with the
// connection already released. fn is dropped when the transaction or the
// savepoint it was registered in rolls back, and when the outcome of COMMIT is
// unknown. Functions run in the order of registration. A panic of one comes out
// of Do, although the transaction has committed, and those after it do not run.
//
// The savepoint may be one of tx.Begin or of a statement of any form, as of GORM, bun or ent. For
// the latter Postgres keeps a mark, which costs a round trip before the next statement that is not
// plain: see [AtCommit]. RESET ALL forgets the marks, and so the functions before it. So does a
// COMMIT without an answer that is found committed later.
//
// It returns false, and does nothing, if tx is not an open handle of a Manager.
func AfterCommit(tx pgx.Tx, fn func()) bool {
	h, ok := tx.(interface{ AfterCommit(fn func()) bool })
	return ok && h.AfterCommit(fn)
}

// AtCommit has one statement run together with COMMIT, in one round trip: a write
// whose result nobody reads and that no later statement of the transaction
// needs to see. If it fails nothing commits, and its error comes out of Do (or
// is retried, like any other). args are kept until then and must not be changed.
// A sql that ends the transaction itself makes the outcome unknown.
//
// The statement belongs to the savepoint, the role and the search_path at the call. So it is sent
// earlier, in a round trip of its own, before any statement that could change these: one that is not
// plainly a single SELECT, INSERT, UPDATE, DELETE, MERGE, VALUES, TABLE or WITH, or that calls
// set_config. Its error is then that of the statement it precedes. (A function that changes such a
// setting inside a SELECT is not recognised.)
//
// It returns false, and does nothing, if tx is not an open handle of a Manager, or if tx.Conn or
// txretrysql.Tx was called, whose statements are not seen here: the caller then runs the statement itself.
func AtCommit(tx pgx.Tx, sql string, args ...any) bool {
	h, ok := tx.(interface {
		AtCommit(sql string, args ...any) bool
	})
	return ok && h.AtCommit(sql, args...)
}

// runAfterCommit runs what fn has registered, if the transaction has committed.
func (c *call) runAfterCommit() {
	if c.last == nil || c.outcome != driver.Committed {
		return
	}
	for _, h := range c.last.afterCommit {
		if c.last.pending.runs(h) {
			h.fn()
		}
	}
}
