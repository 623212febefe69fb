// Package blame decides which rows may have made a batch fail, in the same way for all stores.
package blame

import (
	"context"
	"errors"
	"slices"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
)

// Attempt is the last attempt of a batch's transaction.
type Attempt struct {
	// Rows are the ids of the claimed rows.
	Rows []string
	// Last is the position of the last claimed row.
	Last driver.Cursor
	// Own is an error of a callback, or of the store itself, on a connection that still works.
	Own error
}

// Failure returns err with the rows that may have caused it: the row that a callback names, else all claimed rows.
// They are suspects after any error, so that the other rows need not wait for them. unknown means that the outcome of
// the transaction is unknown. Failure returns nil if no row was claimed.
func (a Attempt) Failure(ctx context.Context, err error, unknown bool) *driver.BatchError {
	if len(a.Rows) == 0 {
		return nil
	}
	failed := &driver.BatchError{Rows: a.Rows, Last: a.Last, Err: err}
	if ctx.Err() != nil { // too slow: any row may be the cause, whatever the error is
		return failed
	}
	failed.Doubtful = unknown || !a.causedByRow(err)
	if named := a.named(err); named != "" && !failed.Doubtful {
		failed.Rows = []string{named}
	}
	return failed
}

// named returns the row that a callback names, unless an earlier call may have hidden its own error.
func (a Attempt) named(err error) string {
	row, ok := errors.AsType[*expiry.RowError](a.Own)
	if !ok || !slices.Contains(a.Rows, row.ID) || sqlstate.Of(err) == transactionFailed {
		return ""
	}
	return row.ID
}

// causedByRow reports whether one of the claimed rows may have caused err: any error of a callback or its statements,
// bad data, a constraint, a trigger. Failures that any row would have do not count.
func (a Attempt) causedByRow(err error) bool {
	if sqlstate.Unavailable(err) {
		return false
	}
	switch code := sqlstate.Of(err); code {
	case "":
		return a.Own != nil && errors.Is(err, a.Own)
	case statementTimeout, transactionFailed:
		return true
	default:
		return !slices.Contains(noRowsFault, code[:min(2, len(code))])
	}
}

const (
	statementTimeout  = "57014" // a row may be slow
	transactionFailed = "25P02" // a callback continued after a failed statement
)

// noRowsFault are, in addition to sqlstate.Unavailable, the SQLSTATE classes of features, the state of the
// transaction, authorization, catalogs, conflicts, schema and permissions, locks, shutdown and internal server
// errors. All other states, including those that triggers define, may come from a row. A wrongly suspected row is
// delayed, but an overlooked one stops all others.
var noRowsFault = []string{"0A", "25", "26", "28", "34", "3B", "3D", "3F", "40", "42", "55", "57", "58", "F0", "XX"}
