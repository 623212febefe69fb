package txretrytest

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/prove"
)

// TB is what a Prove function needs of a *testing.T.
type TB interface {
	Helper()
	Context() context.Context
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
}

// Proof says on which database a Prove function runs code, and what it compares. [Prove] is for a
// transaction, inboxtest.Prove for a handler, idempotencytest.Prove for what has an idempotency key,
// expirytest.Prove for a sweep.
//
// A Prove function first runs the code undisturbed, twice, and counts the statements. Then, for each
// statement, BEGIN and COMMIT included, it starts the code anew on connections of its own and
//
//   - kills the process before the statement, then after it, when nobody has heard the answer: another
//     process does the work again, and then the first one goes on as one that was only stopped, without
//     its connections;
//   - loses the connection after the statement, while the process goes on: at COMMIT that is the reply
//     which is lost;
//   - has the server refuse the statement, as one that takes too long (57014), or COMMIT by a conflict (40001);
//   - has two processes do work that has a key at once, the first waiting before the statement.
//
// Work that has a key is also done again after it was done. Each time the work is repeated until it is
// done, as a broker, a client or a schedule would. The rows must then be those of the undisturbed run.
// A killed process must have left either these or none. The first schedule after which they are not is
// an error of the test; it says at which statement which rows differ, and how to mend that. Of a handler
// with five statements there are some 40 schedules, which take a few seconds.
//
// Statements of one round trip, such as a batch, count as one. At most 100 are allowed. A crash of the
// server is not tried: to a process it is a lost connection.
type Proof struct {
	// Pool is on the database, whose tables exist. Its configuration is that of the pools on which
	// the code runs. Nobody else may write to the tables meanwhile. Required.
	Pool *pgxpool.Pool

	// Reset is SQL, of several statements if need be, that brings the tables to the state in which the
	// work is to be done: before each schedule it must delete all that an earlier one has left, the
	// entry in the inbox or the record of the idempotency key too, and write what the work begins with.
	// Required.
	Reset string

	// Rows are the queries whose results are compared, in any order of rows, such as "TABLE invoices".
	// Leave out the columns that may differ from attempt to attempt, such as ids from a sequence and
	// times: "SELECT order_id, cents FROM invoices". Required.
	Rows []string

	// Effects counts what the code does elsewhere, such as mails, since the beginning. The difference
	// that a schedule makes must be that of the undisturbed run, so count what has the same key on the
	// other side once. Optional.
	Effects func() int
}

// Prove runs a transaction of yours under faults, as [Proof] describes. start makes a process: it is
// given a pool and returns the function to prove, which calls txretry.Manager.Do on it. Since such a
// function has no key, it is only done again where a fault has left nothing of it, and never by two
// processes at once.
func Prove(t TB, p Proof, start func(pool *pgxpool.Pool) (run func(ctx context.Context) error, err error)) {
	t.Helper()
	prove.Run(t, prove.Proof(p), prove.Work{
		Name: "txretrytest.Prove",
		Start: func(_ context.Context, pool *pgxpool.Pool) (func(ctx context.Context) prove.Outcome, error) {
			run, err := start(pool)
			return func(ctx context.Context) prove.Outcome { return prove.Outcome{Err: run(ctx)} }, err
		},
	})
}
