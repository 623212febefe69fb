package txretry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// ErrNested is returned by a Do that is called inside the fn of another Do on
// the same database. Pass the tx on instead, or use its Begin for a savepoint.
var ErrNested = errors.New("txretry: Do called inside the fn of another Do: pass on its tx instead")

// ErrManaged is returned by Commit and Rollback on the handle that fn gets: the
// manager ends the transaction when fn returns.
var ErrManaged = errors.New("txretry: Commit and Rollback are the manager's: return nil or an error from fn instead")

// ErrStandby is found in an error beside the server's own when a statement was
// refused because the server is a hot standby: it takes no writes and no
// SERIALIZABLE transactions.
var ErrStandby = errors.New("txretry: server is a hot standby: use the primary, or ReadOnly at REPEATABLE READ")

// Attempt is one attempt that failed for a transient reason.
type Attempt struct {
	SQLSTATE string        // such as 40001; "" for a COMMIT that was lost and had no effect
	Phase    string        // where it failed: "acquire" (a connection), "begin", "fn" or "commit"
	Duration time.Duration // from acquiring a connection to the failure
	Err      error         // the error itself
}

// LockTimeoutError says that every attempt failed on a lock or a serialization
// conflict, or that the context's deadline left no room for the next one. The
// transaction is rolled back. It maps to HTTP 503 with code LOCK_TIMEOUT.
//
// errors.Is and errors.As reach the last attempt's error, such as its
// *pgconn.PgError, and context.DeadlineExceeded where that decided.
type LockTimeoutError struct {
	Name     string    // Options.Name
	Attempts []Attempt // in order; at least one in what Do returns

	cause      error // why no further attempt was made; nil: all were used
	retryAfter time.Duration
}

// Error implements error.
func (e *LockTimeoutError) Error() string {
	if e.cause != nil {
		return fmt.Sprintf("txretry: %sno further attempt after %d: %v: %v", prefix(e.Name), len(e.Attempts), e.cause, e.last())
	}
	return fmt.Sprintf("txretry: %sall %d attempts failed: %v", prefix(e.Name), len(e.Attempts), e.last())
}

// last returns the last attempt's error, nil for an error that Do did not make,
// such as that of a user's test.
func (e *LockTimeoutError) last() error {
	if len(e.Attempts) == 0 {
		return nil
	}
	return e.Attempts[len(e.Attempts)-1].Err
}

// Unwrap returns the last attempt's error and the context's, if it decided.
func (e *LockTimeoutError) Unwrap() []error {
	var errs []error
	for _, err := range []error{e.last(), e.cause} {
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// Code returns "LOCK_TIMEOUT".
func (e *LockTimeoutError) Code() string { return "LOCK_TIMEOUT" }

// HTTPStatus returns 503.
func (e *LockTimeoutError) HTTPStatus() int { return http.StatusServiceUnavailable }

// RetryAfter returns how long a client should wait before it tries again: the
// longest delay between two attempts, in whole seconds.
func (e *LockTimeoutError) RetryAfter() time.Duration { return e.retryAfter }

// CommitUnknownError says that COMMIT was sent and its answer did not arrive:
// the transaction is either wholly applied or wholly rolled back, and nobody on
// this side knows which. It is never retried, and no AfterCommit function has run.
// It maps to HTTP 500 with code COMMIT_UNKNOWN: a client that just repeats its
// request may do its work twice. Config.XactStatus and Options.Witness find out.
type CommitUnknownError struct {
	Name string // Options.Name
	Err  error  // what came instead of the answer
}

// Error implements error.
func (e *CommitUnknownError) Error() string {
	return fmt.Sprintf("txretry: %soutcome of COMMIT unknown: %v", prefix(e.Name), e.Err)
}

// Unwrap returns what came instead of the answer.
func (e *CommitUnknownError) Unwrap() error { return e.Err }

// Code returns "COMMIT_UNKNOWN".
func (e *CommitUnknownError) Code() string { return "COMMIT_UNKNOWN" }

// HTTPStatus returns 500.
func (e *CommitUnknownError) HTTPStatus() int { return http.StatusInternalServerError }

// SafeToRetry returns false, so that pgconn.SafeToRetry does not believe the
// wrapped error, which may claim the contrary of a COMMIT that was applied.
func (e *CommitUnknownError) SafeToRetry() bool { return false }

func prefix(name string) string {
	if name == "" {
		return ""
	}
	return name + ": "
}

// UnavailableError says that the database could not do its work, whatever the
// work was: no connection was to be had, the connection was lost or the server
// silent on it, or it reported a failure of class 08 (connection), 53
// (out of memory, disk or connections) or 57P (shut down, starting up), or that it
// refuses writes: 25006 (read-only, as a hot standby is; not of a ReadOnly call), 58030 (disk) or
// 54000 (no transaction ids left). The transaction is rolled back. It maps to HTTP 503 with
// code DATABASE_UNAVAILABLE.
//
// SQLSTATE 53200 with a hint at max_pred_locks_per_transaction or
// max_locks_per_transaction says that the server's table of locks is full:
// raise that setting. [Manager.Check] compares it with the load to be expected.
type UnavailableError struct {
	Name  string // Options.Name
	Phase string // where it happened, as Attempt.Phase
	Err   error  // what happened

	retryAfter time.Duration
}

// Error implements error.
func (e *UnavailableError) Error() string {
	return fmt.Sprintf("txretry: %sdatabase unavailable: %v%s", prefix(e.Name), e.Err, hint(e.Err))
}

// Unwrap returns what happened.
func (e *UnavailableError) Unwrap() error { return e.Err }

// Code returns "DATABASE_UNAVAILABLE".
func (e *UnavailableError) Code() string { return "DATABASE_UNAVAILABLE" }

// HTTPStatus returns 503.
func (e *UnavailableError) HTTPStatus() int { return http.StatusServiceUnavailable }

// RetryAfter returns how long a client should wait before it tries again, in
// whole seconds.
func (e *UnavailableError) RetryAfter() time.Duration { return e.retryAfter }

// hint is what the server says about a table of locks that is full. The hint is not in the text
// of a PgError, and in the language of the server, but for the setting's name.
func hint(err error) string {
	var answer *pgconn.PgError
	if errors.As(err, &answer) && answer.Code == "53200" && answer.Hint != "" {
		return " (" + answer.Hint + ")"
	}
	return ""
}

// explain returns the error of a call that was not tried again.
func (c *call) explain(res result) error {
	if !res.outOfOrder && !c.outOfOrder(res.err) {
		return res.err
	}
	return &UnavailableError{Name: c.opts.Name, Phase: res.phase, Err: res.err, retryAfter: c.m.retryAfter()}
}

// outOfOrder reports whether err shows a database that cannot work. What another manager has
// said about its own is not repeated.
func (c *call) outOfOrder(err error) bool {
	var locked *LockTimeoutError
	var unknown *CommitUnknownError
	var unavailable *UnavailableError
	if errors.As(err, &locked) || errors.As(err, &unknown) || errors.As(err, &unavailable) {
		return false
	}
	if errors.Is(err, driver.ErrSilent) || errors.Is(err, driver.ErrNotBegun) {
		return true
	}
	standby := errors.Is(err, ErrStandby)
	if c.opts.ReadOnly && (standby || sqlstate.Of(err) == "25006") { // the call's own mistake
		return false
	}
	return standby || sqlstate.Unavailable(err)
}

// lost reports whether the connection of the transaction was lost, and not closed because a
// context had ended.
func (t *transaction) lost() bool {
	return t.session.State() == driver.Lost &&
		!errors.Is(t.failure, context.Canceled) && !errors.Is(t.failure, context.DeadlineExceeded)
}

// retryAfter is the longest delay between two attempts, in whole seconds.
func (m *Manager) retryAfter() time.Duration {
	return (m.policy.Max + time.Second - 1).Truncate(time.Second)
}

// abortedTransaction is the SQLSTATE of every statement after the one that
// failed: it says nothing about the reason.
const abortedTransaction = "25P02"

// isLockFailure reports whether sqlstate is serialization_failure,
// deadlock_detected or lock_not_available.
func isLockFailure(sqlstate string) bool {
	return sqlstate == "40001" || sqlstate == "40P01" || sqlstate == "55P03"
}

// retries reports whether a new attempt of the same transaction may succeed
// after sqlstate.
func (o *Options) retries(sqlstate string) bool {
	switch sqlstate {
	case "40001", "40P01":
		return true
	case "55P03":
		return !o.NoWait
	case "23505", "23P01":
		return o.RetryConstraints
	}
	return false
}

// transient returns the first SQLSTATE to retry anywhere in err's tree, or "" if
// there is none. The verdict of another manager in the tree is final: what it
// gave up is not tried again.
func (o *Options) transient(err error) string {
	switch e := err.(type) {
	case sqlstate.Reporter:
		if code := e.SQLState(); o.retries(code) {
			return code
		}
		return ""
	case *LockTimeoutError, *CommitUnknownError:
		return ""
	case interface{ Unwrap() error }:
		return o.transient(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			if code := o.transient(err); code != "" {
				return code
			}
		}
	}
	return ""
}

// isMute reports whether err does not tell what the server said: it carries no
// SQLSTATE, or only that the transaction had failed before.
func isMute(err error) bool {
	code := sqlstate.Of(err)
	return code == "" || code == abortedTransaction
}

// ended is the end of ctx as an error under which both ctx.Err() and the cause
// are found.
func ended(ctx context.Context) error { return withCause(ctx, ctx.Err()) }

// withCause joins the cause of ctx's end, if it has ended, to what came of it.
func withCause(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	switch {
	case cause == nil || errors.Is(err, cause):
		return err
	case errors.Is(cause, err):
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}
