package txretry

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// AfterCommit has fn run once after the transaction of tx has definitely
// committed: on the goroutine that called Do, before Do returns, with the
// connection already released. fn is dropped when the transaction or the
// savepoint it was registered in rolls back, and when the outcome of COMMIT is
// unknown. Functions run in the order of registration. A panic of one comes out of Do,
// although the transaction has committed, and the functions after it do not run.
//
// It returns false, and does nothing, if tx is not an open handle of a Manager.
func AfterCommit(tx pgx.Tx, fn func()) bool {
	h, ok := tx.(interface{ AfterCommit(fn func()) bool })
	return ok && h.AfterCommit(fn)
}

// AtCommit has a statement run together with COMMIT, in one round trip: a write
// whose result nobody reads and that no later statement of the transaction
// needs to see. If it fails nothing commits, and its error comes out of Do (or
// is retried, like any other). It is dropped when the savepoint it was
// registered in rolls back. args are kept until then and must not be changed.
//
// It returns false, and does nothing, if tx is not an open handle of a Manager:
// the caller then runs the statement itself.
func AtCommit(tx pgx.Tx, sql string, args ...any) bool {
	h, ok := tx.(interface {
		AtCommit(sql string, args ...any) bool
	})
	return ok && h.AtCommit(sql, args...)
}

// Hooks are optional callbacks for observation. They run on the goroutine that
// called Do, while no connection is held, and should return quickly.
type Hooks struct {
	// OnRetry runs after a failed attempt that will be followed by another one,
	// before the delay.
	OnRetry func(ctx context.Context, r Retry)

	// OnDone runs once per call of Do that began work, before the AfterCommit
	// functions.
	OnDone func(ctx context.Context, d Done)
}

// Retry describes a failed attempt that will be followed by another one.
type Retry struct {
	Name    string        // Options.Name
	Number  int           // of the failed attempt, from 1
	Attempt Attempt       // what happened
	Delay   time.Duration // until the next attempt
}

// Done describes a finished call of Do.
type Done struct {
	Name     string        // Options.Name
	Outcome  Outcome       // what became of the transaction
	Attempts int           // how many were made, the last one included
	Duration time.Duration // of the whole call, delays included
	Err      error         // what Do returns
}

// Outcome is what became of a transaction.
type Outcome string

// The outcomes of a transaction.
const (
	Committed  Outcome = "committed"
	RolledBack Outcome = "rolled_back"
	Unknown    Outcome = "unknown" // COMMIT was sent and not answered
)
