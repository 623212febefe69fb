package driver

import "fmt"

// BatchError is the failure of a batch that one of its rows may have caused.
// The Sweeper sets the rows aside, goes on with the others, and then halves the
// batch until the row is found.
type BatchError struct {
	// Rows are the ids of the rows that may be at fault: those that were claimed,
	// or one of them if it is known to be that one.
	Rows []string
	// Last is the place of the last row that was claimed.
	Last Cursor
	// Doubtful says that rows rarely cause such a failure: a lost connection, a full
	// disk, a conflict or an error of the schema. A row that fails so is passed by. It
	// stays out of quarantine even if it is alone, and a second such batch ends the
	// sweep.
	Doubtful bool
	// Err is what went wrong.
	Err error
}

// Error implements error.
func (e *BatchError) Error() string {
	if e.Doubtful {
		return fmt.Sprintf("expiry: batch of %d rows: %v", len(e.Rows), e.Err)
	}
	return fmt.Sprintf("expiry: batch, %d rows may be at fault: %v", len(e.Rows), e.Err)
}

// Unwrap returns what went wrong.
func (e *BatchError) Unwrap() error { return e.Err }
