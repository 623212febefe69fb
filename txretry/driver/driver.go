// Package driver is what a source of transactions implements, so that
// txretry.NewOver runs a manager on it: a Postgres pool and the memory of
// txretrytest are such sources. Users of a manager do not need it.
package driver

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Source hands out sessions. Its dynamic type must be comparable: a Do inside the
// fn of another Do is refused if their sources are equal.
type Source interface {
	// Acquire waits for a session until ctx is done or the limit is reached.
	Acquire(ctx context.Context, limits Limits) (Session, error)

	// Fate asks, on a connection of its own, what became of the transaction with
	// this id, which had not begun before the time begun. Unknown means that it has not ended.
	Fate(ctx context.Context, limits Limits, xid string, begun time.Time) (Outcome, error)
}

// Pooler is an optional interface of a Source and of a Transactor: the pool that its transactions run
// on, for statements outside of them. Nil: there is none.
type Pooler interface{ Pool() *pgxpool.Pool }

// Limits bound the waits of one session.
type Limits struct {
	Acquire   time.Duration // for a connection
	Begin     time.Duration // for the answer to BEGIN, or to what is as short
	First     time.Duration // for the answer to BEGIN and a first statement in one message; 0: none
	Statement time.Duration // for the answer to a statement, or its next part; 0: none
}

// Session runs one transaction: Begin, statements and savepoints, then Commit
// or Rollback, and always Close. It serves one goroutine.
type Session interface {
	// Begin starts the transaction and runs the first statement in it, if there is
	// one, whose tag it returns. The statement's Look comes before. The error is
	// ErrNotBegun where the connection was lost before BEGIN was answered.
	Begin(ctx context.Context, spec *Spec, first *Statement) (pgconn.CommandTag, error)

	// Tx runs the statements of the transaction. It is asked for nothing that
	// begins or ends a transaction or a savepoint.
	Tx() pgx.Tx

	// State tells what is known about the transaction without asking the server.
	State() State

	// XID returns the id of the transaction if its Spec wanted it, else "".
	XID() string

	// Standby tells whether the server last said that it is a hot standby.
	Standby() bool

	// Savepoint, Release and RollbackTo manage savepoints by number. RollbackTo
	// also releases the savepoint.
	Savepoint(ctx context.Context, id int) error
	Release(ctx context.Context, id int) error
	RollbackTo(ctx context.Context, id int) error

	// Commit runs the last statements and then COMMIT, none of them unless all
	// succeed, within timeout. ctx is never done. The error is nil exactly when the
	// outcome is Committed; it is ErrNotSent where the connection was found lost
	// before.
	Commit(ctx context.Context, timeout time.Duration, last []Statement) (Outcome, error)

	// Rollback ends the transaction if it is still open.
	Rollback(ctx context.Context) error

	// Close gives the session back, without waiting for a server that is silent.
	// Nothing may be called afterwards.
	Close()
}

// Runner is an optional interface of a Session: users run statements on it, and one of them may roll back
// to a savepoint that the manager does not know.
type Runner interface {
	// Run runs statements at once, in their order, in one round trip where the session can do that. The
	// first one that fails ends it.
	Run(ctx context.Context, statements []Statement) error
}

// Spec says how a transaction begins.
type Spec struct {
	SQL      string   // one message: begin and its settings
	Parts    []string // the statements in it
	ReadOnly bool
	Aside    bool // no attempt at fn, but a look at what became of one
	WantsXID bool // the last result of SQL is the transaction's id
}

// Statement is one that travels with BEGIN or COMMIT, in one round trip. The zero value is none.
type Statement struct {
	SQL  string
	Args []any // must not be changed before the call returns

	// Done receives what a statement that travels with BEGIN did, right before each call of fn. Optional.
	Done func(tag pgconn.CommandTag)

	// Look is a query that travels with BEGIN, ahead of it. Optional.
	Look *Look

	// Read scans the row of a statement that travels with COMMIT. Optional.
	Read func(row pgx.Row) error

	// Explain wraps the error of COMMIT that the statement may have caused. Optional.
	Explain func(error) error

	// Effect is what stands for a statement on the fake. Optional.
	Effect *Effect
}

// Look is a query for at most one row that runs outside of the transaction. Inside, at SERIALIZABLE, it
// would conflict with those who write beside what it reads.
type Look struct {
	SQL  string
	Args []any // must not be changed before the call returns

	// Read scans the row, or gets pgx.ErrNoRows from it. It runs again when BEGIN is sent again. Its error
	// becomes that of BEGIN.
	Read func(row pgx.Row) error
}

// Effect is a change of memory that belongs to COMMIT.
type Effect struct {
	Apply        func() error
	Undo, Commit func()
}

// State is what is known about a session's transaction.
type State byte

// The states of a session.
const (
	Idle   State = iota // no transaction is open
	Open                // a transaction is open and sound
	Failed              // a statement failed; only a rollback is possible
	Busy                // the rows of a query are still being read
	Lost                // the connection is gone
)

// Outcome is what became of a transaction.
type Outcome byte

// The outcomes of a commit.
const (
	RolledBack Outcome = iota // definitely not applied
	Committed                 // definitely applied
	Unknown                   // COMMIT was sent and not answered
)

// String returns the value of the attribute "outcome" in metrics and spans.
func (o Outcome) String() string {
	switch o {
	case RolledBack:
		return "rolled_back"
	case Committed:
		return "committed"
	}
	return "unknown"
}

// ErrForgotten is returned by Fate for an id that the server does not know (any
// more), or may have given away twice: asking again does not help.
var ErrForgotten = errors.New("the server does not know the transaction")

// ErrSilent is in the error of what the server did not answer in time.
var ErrSilent = errors.New("txretry: the server did not answer in time, so the connection was closed")

// ErrNotBegun is in the error of a Begin whose connection was lost before BEGIN was
// answered: it may be sent again on another one.
var ErrNotBegun = errors.New("connection lost before BEGIN was answered")

// ErrNotSent is in the error of a Commit that was not sent.
var ErrNotSent = errors.New("connection lost before COMMIT was sent")

// Refuses reports whether what the server answers to COMMIT proves that it did not
// commit. An error of class 08 (connection exception) may come from a pooler that
// has lost the server, and a FATAL one from a backend that had committed before.
func Refuses(answer *pgconn.PgError) bool {
	return !IsFatal(answer) && answer.Code != "40003" && !strings.HasPrefix(answer.Code, "08")
}

// IsFatal reports whether the server closes the connection after this.
func IsFatal(answer *pgconn.PgError) bool {
	severity := answer.SeverityUnlocalized
	if severity == "" {
		severity = answer.Severity
	}
	return severity == "FATAL" || severity == "PANIC"
}

// AskFate is the statement of Source.Fate on Postgres: its arguments are the id and AgeOf the transaction,
// and FateOf reads the first column. It also ends the transaction if the server still waits for its client,
// which has gone. A transaction that is committing goes on.
//
// A server that has crashed meanwhile gives an id of which it had written nothing to its disk to another
// transaction. It is known by its statistics, which begin anew when it recovers, and go on when it is
// restarted in order: after a crash the statement answers NULL and ends no transaction.
const AskFate = `select case when not crashed then pg_xact_status(x) end, (
		select bool_or(pg_terminate_backend(pid)) from pg_stat_activity
		where not crashed and backend_xid = x::xid and state like 'idle in transaction%' and usename = current_user
	) from (select $1::text::xid8, coalesce(stats_reset > clock_timestamp() - make_interval(secs => $2::float8), true)
		from pg_stat_bgwriter) as asked(x, crashed)`

// ageMargin is how much the server's clock may gain on that of the client meanwhile.
const ageMargin = time.Second

// AgeOf returns within how many seconds before now a transaction began, by the client's own clock.
func AgeOf(begun time.Time) float64 { return (time.Since(begun) + ageMargin).Seconds() }

// FateOf reads the answer to AskFate: pg_xact_status does not know an id of the future, as after a failover
// (22023), or one whose log is gone (NULL), and is not asked after a crash (NULL). sqlstate is that of err.
func FateOf(status *string, sqlstate string, err error) (Outcome, error) {
	switch {
	case sqlstate == "22023", err == nil && status == nil:
		return Unknown, ErrForgotten
	case err != nil:
		return Unknown, err
	case *status == "committed":
		return Committed, nil
	case *status == "aborted":
		return RolledBack, nil
	}
	return Unknown, nil
}

// Hint has fn run after the transaction of tx has committed, even if the savepoint in which it was
// registered was rolled back. It costs nothing, unlike txretry.AfterCommit, so it suits a wake-up that
// may be in vain. fn must not block. Hint returns false, and does nothing, if tx is not an open handle of a manager.
func Hint(tx pgx.Tx, fn func()) bool {
	h, ok := tx.(interface{ HintAfterCommit(fn func()) bool })
	return ok && h.HintAfterCommit(fn)
}

// StateOf returns what is known of the transaction of tx: of a handle of a manager, or of a pgx.Tx with a
// connection. Of any other, and of a handle that is over, it is Open: nothing is known. Unlike Conn of a
// handle it gives nothing away.
func StateOf(tx pgx.Tx) State {
	state := Open
	if h, ok := tx.(interface {
		Statement(run func(s Session) error) error
	}); ok {
		_ = h.Statement(func(s Session) error { // its error says that the handle is over
			state = s.State()
			return nil
		})
		return state
	}
	conn := tx.Conn()
	switch {
	case conn == nil:
		return Open
	case conn.IsClosed():
		return Lost
	}
	switch conn.PgConn().TxStatus() {
	case 'I':
		return Idle
	case 'E':
		return Failed
	}
	return Open
}
