package expiry

import (
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
)

// Row is one row that expires.
type Row struct {
	// ID is the primary key as text.
	ID string
	// Deadline is the moment from which the row counts as expired.
	Deadline time.Time
	// Values holds the further columns that the store was configured to read, as
	// text in the database's form. A column that is NULL is missing.
	Values map[string]string
}

// RowError is an error of a callback that knows which row is at fault. The
// others then need no search for it.
type RowError struct {
	// ID is the row's primary key as text.
	ID string
	// Err is what went wrong.
	Err error
}

// Error implements error.
func (e *RowError) Error() string { return fmt.Sprintf("expiry: row %s: %v", e.ID, e.Err) }

// Unwrap returns what went wrong.
func (e *RowError) Unwrap() error { return e.Err }

// EventID returns the id of the message that announces an expiry. It is a UUID
// of version 7 whose time is the deadline, and it is the same whenever kind, row
// and deadline (to the microsecond) are: a batch that is run again cannot
// announce the same expiry under a second id. kind is usually the message name.
func EventID(kind, rowID string, deadline time.Time) uuid.UUID {
	return ids.Deterministic(deadline, kind, rowID)
}
