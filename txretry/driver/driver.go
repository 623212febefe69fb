// Package driver defines the interfaces of a transaction source for txretry.NewOver. A Postgres pool and the
// in-memory database of txretrytest are such sources. Users of a manager do not need this package.
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

// Source provides sessions. Its dynamic type must be comparable: a Do inside the fn of another Do is rejected if
// their sources are equal.
type Source interface {
	// Acquire waits for a session until ctx is done or the time limit is reached.
	Acquire(ctx context.Context, limits Limits) (Session, error)

	// Fate returns the outcome of the transaction with this id, which began at the time begun or later. It uses a
	// separate connection. Unknown means that the transaction has not ended.
	Fate(ctx context.Context, limits Limits, xid string, begun time.Time) (Outcome, error)
}

// Pooler is an optional interface of a Source and of a Transactor. It returns the pool of its transactions, for
// statements outside of them, or nil if there is none.
type Pooler interface{ Pool() *pgxpool.Pool }

// Limits are the time limits of one session.
type Limits struct {
	Acquire   time.Duration // for a connection
	Begin     time.Duration // for the reply to BEGIN, or to another short statement
	First     time.Duration // for the reply to BEGIN and a first statement in one message; 0: no limit
	Statement time.Duration // for the reply to a statement, or its next part; 0: no limit
}

// Session runs one transaction: Begin, statements and savepoints, then Commit or Rollback, and always Close. It is
// not safe for concurrent use.
type Session interface {
	// Begin starts the transaction and runs the first statement in it, if there is one, and returns the statement's
	// tag. The statement's Look runs before. The error is ErrNotBegun if the connection was lost before the reply to
	// BEGIN.
	Begin(ctx context.Context, spec *Spec, first *Statement) (pgconn.CommandTag, error)

	// Tx runs the statements of the transaction. The manager does not use it to begin or end a transaction or a
	// savepoint.
	Tx() pgx.Tx

	// State returns the known state of the transaction without a server call.
	State() State

	// XID returns the id of the transaction if its Spec requested it, else "".
	XID() string

	// Standby reports whether the server was a hot standby at its last report.
	Standby() bool

	// Savepoint, Release and RollbackTo manage savepoints by number. RollbackTo also releases the savepoint.
	Savepoint(ctx context.Context, id int) error
	Release(ctx context.Context, id int) error
	RollbackTo(ctx context.Context, id int) error

	// Commit runs the last statements and then COMMIT, within timeout. It commits only if all statements succeed. ctx
	// is never done. The error is nil exactly if the outcome is Committed. It is ErrNotSent if the connection was
	// lost before COMMIT was sent.
	Commit(ctx context.Context, timeout time.Duration, last []Statement) (Outcome, error)

	// Rollback ends the transaction if it is still open.
	Rollback(ctx context.Context) error

	// Close releases the session, without waiting for a silent server. No method may be called afterwards.
	Close()
}

// Runner is an optional interface of a Session on which users run statements that the manager does not see, such as a
// rollback to a savepoint.
type Runner interface {
	// Run runs statements immediately and in order, in one round trip if the session can do that. It stops at the
	// first failure.
	Run(ctx context.Context, statements []Statement) error
}

// Spec describes how a transaction begins.
type Spec struct {
	SQL      string   // one message: begin and its settings
	Parts    []string // the statements in SQL
	ReadOnly bool
	Aside    bool // not an attempt at fn, but a query for the outcome of an attempt
	WantsXID bool // the last result of SQL is the transaction's id
}

// Statement is a statement that is sent together with BEGIN or COMMIT, in one round trip. The zero value is no
// statement.
type Statement struct {
	SQL  string
	Args []any // must not be changed before the call returns

	// Done receives the tag of a statement sent with BEGIN, before each call of fn. Optional.
	Done func(tag pgconn.CommandTag)

	// Look is a query sent with BEGIN that runs before it. Optional.
	Look *Look

	// Read scans the row of a statement sent with COMMIT. Optional.
	Read func(row pgx.Row) error

	// Explain wraps the error of COMMIT that the statement may have caused. Optional.
	Explain func(error) error

	// Effect replaces the statement on the fake. Optional.
	Effect *Effect
}

// Look is a query for at most one row that runs outside of the transaction. Inside a SERIALIZABLE transaction, it
// would conflict with writers of neighbouring rows.
type Look struct {
	SQL  string
	Args []any // must not be changed before the call returns

	// Read scans the row; Scan may return pgx.ErrNoRows. Read is called again when BEGIN is sent again. Its error
	// becomes the error of BEGIN.
	Read func(row pgx.Row) error
}

// Effect is a change in memory that takes effect with COMMIT.
type Effect struct {
	Apply        func() error
	Undo, Commit func()
}

// State is the known state of a session's transaction.
type State byte

// The states of a session.
const (
	Idle   State = iota // no transaction is open
	Open                // a transaction is open and has not failed
	Failed              // a statement failed; only a rollback is possible
	Busy                // the rows of a query are still being read
	Lost                // the connection is lost
)

// Outcome is the outcome of a transaction.
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

// ErrForgotten is returned by Fate for an id that the server does not know (any more), or may have used twice. Asking
// again does not help.
var ErrForgotten = errors.New("the server does not know the transaction")

// ErrSilent is joined to the error of a call that the server did not answer in time.
var ErrSilent = errors.New("txretry: the server did not answer in time, so the connection was closed")

// ErrNotBegun is joined to the error of a Begin whose connection was lost before the reply to BEGIN. BEGIN may be
// sent again on another connection.
var ErrNotBegun = errors.New("connection lost before BEGIN was answered")

// ErrNotSent is joined to the error of a Commit that was not sent.
var ErrNotSent = errors.New("connection lost before COMMIT was sent")

// Refuses reports whether the server's reply to COMMIT proves that it did not commit. An error of class 08
// (connection exception) may come from a pooler that lost the server. A FATAL error may come from a backend that had
// committed before.
func Refuses(answer *pgconn.PgError) bool {
	return !IsFatal(answer) && answer.Code != "40003" && !strings.HasPrefix(answer.Code, "08")
}

// IsFatal reports whether the server closes the connection after this reply.
func IsFatal(answer *pgconn.PgError) bool {
	severity := answer.SeverityUnlocalized
	if severity == "" {
		severity = answer.Severity
	}
	return severity == "FATAL" || severity == "PANIC"
}

// AskFate is the statement of Source.Fate on Postgres. Its arguments are the id and AgeOf of the transaction; FateOf
// reads the first column. It also ends the transaction if the server still waits for its client, which is gone. A
// committing transaction continues.
//
// A server that crashes may give an id to another transaction if it had written nothing about the id to disk. AskFate
// detects a crash by the server's statistics, which are reset by a recovery, but not by a clean restart. After a
// crash, the statement returns NULL and ends no transaction.
const AskFate = `select case when not crashed then pg_xact_status(x) end, (
		select bool_or(pg_terminate_backend(pid)) from pg_stat_activity
		where not crashed and backend_xid = x::xid and state like 'idle in transaction%' and usename = current_user
	) from (select $1::text::xid8, coalesce(stats_reset > clock_timestamp() - make_interval(secs => $2::float8), true)
		from pg_stat_bgwriter) as asked(x, crashed)`

// ageMargin is how far the server's clock may advance over the client's clock meanwhile.
const ageMargin = time.Second

// AgeOf returns an upper limit for the age of a transaction in seconds, by the client's own clock.
func AgeOf(begun time.Time) float64 { return (time.Since(begun) + ageMargin).Seconds() }

// FateOf reads the reply to AskFate. pg_xact_status does not know an id of the future, for example after a failover
// (22023), or an id whose log is gone (NULL). After a crash, it is not called (NULL). sqlstate is the SQLSTATE of
// err.
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

// Hint registers fn to run after the transaction of tx has committed, even if the savepoint of the registration was
// rolled back. Unlike txretry.AfterCommit it costs nothing, so it suits a wake-up that may be unnecessary. fn must
// not block. Hint returns false, and does nothing, if tx is not an open handle of a manager.
func Hint(tx pgx.Tx, fn func()) bool {
	h, ok := tx.(interface{ HintAfterCommit(fn func()) bool })
	return ok && h.HintAfterCommit(fn)
}

// StateOf returns the known state of the transaction of tx: of a handle of a manager, or of a pgx.Tx with a
// connection. For any other tx, and for a stale handle, it returns Open. Unlike Conn of a handle, it does not expose
// the connection.
func StateOf(tx pgx.Tx) State {
	state := Open
	if h, ok := tx.(interface {
		Statement(run func(s Session) error) error
	}); ok {
		_ = h.Statement(func(s Session) error { // an error means that the handle is stale
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
