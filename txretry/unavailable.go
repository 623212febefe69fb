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
