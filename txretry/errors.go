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

// ErrNested is returned by a Do inside the fn of another Do on the same database. Use the tx of the outer Do instead,
// or its Begin for a savepoint.
var ErrNested = errors.New("txretry: Do called inside the fn of another Do: use its tx instead")

// ErrManaged is returned by Commit and Rollback on the handle that fn receives. The manager ends the transaction when
// fn returns.
var ErrManaged = errors.New("txretry: fn called Commit or Rollback: return nil or an error from fn instead")

// ErrStandby is joined to the server's error when a statement failed because the server is a hot standby. A hot
// standby rejects writes and SERIALIZABLE transactions.
var ErrStandby = errors.New("txretry: server is a hot standby: use the primary, or ReadOnly at REPEATABLE READ")

// Attempt is one attempt that failed for a transient reason.
type Attempt struct {
	SQLSTATE string        // such as 40001; "" for a COMMIT whose reply was lost and that had no effect
	Phase    string        // where it failed: "acquire" (a connection), "begin", "fn" or "commit"
	Duration time.Duration // from acquiring a connection to the failure
	Err      error         // the error itself
}

// LockTimeoutError means that every attempt failed on a lock or a serialization conflict, or that the context's
// deadline left no time for the next attempt. The transaction is rolled back. If Attempts is empty,
// Config.RetryBudget did not let the call start. It maps to HTTP 503 with code LOCK_TIMEOUT.
//
// errors.Is and errors.As find the last attempt's error, such as its *pgconn.PgError, and context.DeadlineExceeded if
// the deadline was the reason.
type LockTimeoutError struct {
	Name     string    // Options.Name
	Attempts []Attempt // in order; none if the call was not started

	cause      error // why no further attempt was made; nil: all attempts were used
	retryAfter time.Duration
}

// Error implements error.
func (e *LockTimeoutError) Error() string {
	if len(e.Attempts) == 0 && e.cause != nil {
		return fmt.Sprintf("txretry: %snot started: %v", prefix(e.Name), e.cause)
	}
	if e.cause != nil {
		return fmt.Sprintf("txretry: %sno further attempt after %d: %v: %v", prefix(e.Name), len(e.Attempts), e.cause, e.last())
	}
	return fmt.Sprintf("txretry: %sall %d attempts failed: %v", prefix(e.Name), len(e.Attempts), e.last())
}

// last returns the last attempt's error, or nil for an error that Do did not create, for example in a user's test.
func (e *LockTimeoutError) last() error {
	if len(e.Attempts) == 0 {
		return nil
	}
	return e.Attempts[len(e.Attempts)-1].Err
}

// Unwrap returns the last attempt's error and, if the context was the reason, the context's error.
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

// RetryAfter returns how long a client should wait before it retries: the longest delay between two attempts, in
// whole seconds.
func (e *LockTimeoutError) RetryAfter() time.Duration { return e.retryAfter }

// CommitUnknownError means that COMMIT was sent and its reply did not arrive. The transaction is either completely
// applied or completely rolled back, and the client does not know which. It is never retried, and no AfterCommit
// function has run. It maps to HTTP 500 with code COMMIT_UNKNOWN: a client that repeats its request may do its work
// twice. Config.XactStatus and Options.Witness find the outcome.
type CommitUnknownError struct {
	Name string // Options.Name
	Err  error  // the error instead of a reply
}

// Error implements error.
func (e *CommitUnknownError) Error() string {
	return fmt.Sprintf("txretry: %soutcome of COMMIT unknown: %v", prefix(e.Name), e.Err)
}

// Unwrap returns the error instead of a reply.
func (e *CommitUnknownError) Unwrap() error { return e.Err }

// Code returns "COMMIT_UNKNOWN".
func (e *CommitUnknownError) Code() string { return "COMMIT_UNKNOWN" }

// HTTPStatus returns 500.
func (e *CommitUnknownError) HTTPStatus() int { return http.StatusInternalServerError }

// SafeToRetry returns false, so that pgconn.SafeToRetry ignores the wrapped error, which may report true for a COMMIT
// that was applied.
func (e *CommitUnknownError) SafeToRetry() bool { return false }

func prefix(name string) string {
	if name == "" {
		return ""
	}
	return name + ": "
}

// UnavailableError means that the database could not work, independent of the transaction. Either no connection could
// be acquired, or the connection was lost, or the server did not answer. Or the server reported a failure of class 08
// (connection), 53 (out of memory, disk or connections) or 57P (shut down, starting up). Or it rejects writes: 25006
// (read-only, like a hot standby; not for a ReadOnly call), 58030 (disk) or 54000 (no transaction ids left). The
// transaction is rolled back. It maps to HTTP 503 with code DATABASE_UNAVAILABLE.
//
// SQLSTATE 53200 with a hint about max_pred_locks_per_transaction or max_locks_per_transaction means that the
// server's lock table is full: raise that setting. [Manager.Check] compares it with the expected load.
type UnavailableError struct {
	Name  string // Options.Name
	Phase string // where it happened, as in Attempt.Phase
	Err   error  // the cause

	retryAfter time.Duration
}

// Error implements error.
func (e *UnavailableError) Error() string {
	return fmt.Sprintf("txretry: %sdatabase unavailable: %v%s", prefix(e.Name), e.Err, hint(e.Err))
}

// Unwrap returns the cause.
func (e *UnavailableError) Unwrap() error { return e.Err }

// Code returns "DATABASE_UNAVAILABLE".
func (e *UnavailableError) Code() string { return "DATABASE_UNAVAILABLE" }

// HTTPStatus returns 503.
func (e *UnavailableError) HTTPStatus() int { return http.StatusServiceUnavailable }

// RetryAfter returns how long a client should wait before it retries, in whole seconds.
func (e *UnavailableError) RetryAfter() time.Duration { return e.retryAfter }

// hint returns the server's hint about a full lock table. The text of a PgError does not include the hint. The hint
// is in the server's language, except for the name of the setting.
func hint(err error) string {
	var answer *pgconn.PgError
	if errors.As(err, &answer) && answer.Code == "53200" && answer.Hint != "" {
		return " (" + answer.Hint + ")"
	}
	return ""
}

// explain returns the error of a call that was not retried.
func (c *call) explain(res result) error {
	if !res.outOfOrder && !c.outOfOrder(res.err) {
		return res.err
	}
	return &UnavailableError{Name: c.opts.Name, Phase: res.phase, Err: res.err, retryAfter: c.m.retryAfter()}
}

// outOfOrder reports whether err shows a database that cannot work. It returns false for errors of another manager,
// which has classified them already.
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
	if c.opts.ReadOnly && (standby || sqlstate.Of(err) == "25006") { // a mistake in the call
		return false
	}
	return standby || sqlstate.Unavailable(err)
}

// lost reports whether the connection of the transaction was lost. It returns false if the connection was closed
// because a context had ended.
func (t *transaction) lost() bool {
	return t.session.State() == driver.Lost &&
		!errors.Is(t.failure, context.Canceled) && !errors.Is(t.failure, context.DeadlineExceeded)
}

// retryAfter returns the longest delay between two attempts, in whole seconds.
func (m *Manager) retryAfter() time.Duration {
	return (m.policy.Max + time.Second - 1).Truncate(time.Second)
}

// abortedTransaction is the SQLSTATE of every statement after the failed one. It does not show the reason.
const abortedTransaction = "25P02"

// isLockFailure reports whether sqlstate is serialization_failure, deadlock_detected or lock_not_available.
//
// Postgres may report an expired lock_timeout as 57014, "canceling statement due to user request": it grants the lock at
// the moment of the timeout, and the statement then waits for a second lock, such as a row's after its place in the
// queue. Starting the second wait deletes the note that it was a timeout. This is rare, about one in 100,000 timeouts
// with many waiters of one row. A cancelled statement and statement_timeout have the same SQLSTATE and must not be
// retried, so 57014 is never retried. The transaction is rolled back in any case.
func isLockFailure(sqlstate string) bool {
	return sqlstate == "40001" || sqlstate == "40P01" || sqlstate == "55P03"
}

// retries reports whether a new attempt of the same transaction may succeed after sqlstate.
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

// transient returns the first SQLSTATE to retry anywhere in err's tree, or "" if there is none. It does not retry an
// error that another manager has given up.
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

// isMute reports whether err does not contain the server's reason: it has no SQLSTATE, or only the SQLSTATE of a
// transaction that had failed before.
func isMute(err error) bool {
	code := sqlstate.Of(err)
	return code == "" || code == abortedTransaction
}

// ended returns the end of ctx as an error that contains both ctx.Err() and the cause.
func ended(ctx context.Context) error { return withCause(ctx, ctx.Err()) }

// withCause adds the cause of ctx's end, if it has ended, to err.
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
