package txretry

import "github.com/holdfast-go/holdfast/internal/sqlstate"

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
