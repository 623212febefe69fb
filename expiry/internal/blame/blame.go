// Package blame decides which rows may have made a batch fail, for every store in
// the same way.
package blame

import (
	"context"
	"errors"
	"slices"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
)

// Attempt is what is known of the attempt that ended the transaction of a batch.
type Attempt struct {
	// Rows are the ids of the claimed rows.
	Rows []string
	// Last is the place of the last of them.
	Last driver.Cursor
	// Own is the error of a callback, or of the store itself, on a connection that
	// still works.
	Own error
}

// Failure is err with the rows one of which may have caused it: the one that a
// callback names, else all that were claimed. They are suspected whatever it was,
// since the others then need not wait for them. unknown says that it is not known
// whether the transaction has committed. It is nil if no row was claimed.
func (a Attempt) Failure(ctx context.Context, err error, unknown bool) *driver.BatchError {
	if len(a.Rows) == 0 {
		return nil
	}
	failed := &driver.BatchError{Rows: a.Rows, Last: a.Last, Err: err}
	if ctx.Err() != nil { // too slow: any row may be, whatever it came to
		return failed
	}
	failed.Doubtful = unknown || !a.causedByRow(err)
	if named := a.named(err); named != "" && !failed.Doubtful {
		failed.Rows = []string{named}
	}
	return failed
}

// named is the row that a callback names, unless an earlier call may have hidden an
// error of its own.
func (a Attempt) named(err error) string {
	row, ok := errors.AsType[*expiry.RowError](a.Own)
	if !ok || !slices.Contains(a.Rows, row.ID) || sqlstate.Of(err) == transactionFailed {
		return ""
	}
	return row.ID
}

// causedByRow reports whether one of the claimed rows may have caused err: any error
// of a callback's own or of its statements, bad data, a constraint, a trigger, but
// not what would hit any row.
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
	transactionFailed = "25P02" // a callback went on after a statement that failed
)

// noRowsFault are, beside those of sqlstate.Unavailable, the SQLSTATE classes of features, the state of
// the transaction, authorization, catalogs, conflicts, schema and permissions,
// locks, shutdown and the server's own faults. Everything else,
// states that triggers make up included, may come from a row: to suspect one
// wrongly delays it, to overlook it stops all the others.
var noRowsFault = []string{"0A", "25", "26", "28", "34", "3B", "3D", "3F", "40", "42", "55", "57", "58", "F0", "XX"}
