package txretry

import (
	"errors"
	"fmt"
	"net/http"
	"time"
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
