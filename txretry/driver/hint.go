package driver

import "github.com/jackc/pgx/v5"

// Hint has fn run after the transaction of tx has committed, even if the savepoint in which it was
// registered was rolled back. It costs nothing, unlike txretry.AfterCommit, so it suits a wake-up that
// may be in vain. fn must not block. Hint returns false, and does nothing, if tx is not an open handle of a manager.
func Hint(tx pgx.Tx, fn func()) bool {
	h, ok := tx.(interface{ HintAfterCommit(fn func()) bool })
	return ok && h.HintAfterCommit(fn)
}
