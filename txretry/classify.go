package txretry

import (
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
)

// abortedTransaction is the SQLSTATE of every statement after the one that
// failed: it says nothing about the reason.
const abortedTransaction = "25P02"

// isTransient reports whether a new attempt of the same transaction may
// succeed: serialization_failure, deadlock_detected, lock_not_available.
func isTransient(sqlstate string) bool {
	return sqlstate == "40001" || sqlstate == "40P01" || sqlstate == "55P03"
}

// transient returns the first transient SQLSTATE anywhere in err's tree, or ""
// if there is none. The verdict of another manager in the tree is final: what
// it gave up is not tried again.
func transient(err error) string {
	switch e := err.(type) {
	case *pgconn.PgError:
		if isTransient(e.Code) {
			return e.Code
		}
		return ""
	case *LockTimeoutError, *CommitUnknownError:
		return ""
	case interface{ Unwrap() error }:
		return transient(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			if code := transient(err); code != "" {
				return code
			}
		}
	}
	return ""
}

// isMute reports whether err does not tell what the server said: it carries no
// SQLSTATE, or only that the transaction had failed before.
func isMute(err error) bool {
	var pgErr *pgconn.PgError
	return !errors.As(err, &pgErr) || pgErr.Code == abortedTransaction
}
