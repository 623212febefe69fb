package expiry

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// Store holds the rows that expire. expirypgx.Store keeps them in a Postgres
// table, expirytest.Store in memory; the suite in expirytest/conformance says
// what every Store promises. Methods are called by many goroutines.
type Store interface {
	// SweepBatch expires up to req.Limit rows that are active and past their
	// deadline by the store's own clock, longest overdue first, in one
	// transaction: it locks rows that nobody else holds, changes their state if
	// they are still active and still due, and emits what follows from it. Rows
	// in req.Skip are left alone.
	//
	// On an error nothing has changed, unless the outcome of the commit is
	// unknown; a repeated call expires no row twice. An error that one of the
	// rows may have caused is a *BatchError.
	SweepBatch(ctx context.Context, req Request) (Batch, error)

	// NextDue returns how long from now, by the store's clock, the earliest
	// active row outside skip falls due; zero or less if one is due already, and
	// false if there is none.
	NextDue(ctx context.Context, skip []string) (time.Duration, bool, error)
}

// Request asks a Store for one batch.
type Request struct {
	// Limit is the largest number of rows to expire, at least 1.
	Limit int
	// Skip holds the ids of rows that must not be touched.
	Skip []string
}

// Batch is what one committed batch did.
type Batch struct {
	// Claimed counts the rows that were found due and locked. Fewer than asked
	// for means that nothing else is due that nobody else is working on.
	Claimed int
	// Expired counts those whose state was changed.
	Expired int
	// Lag is how long the longest overdue row of the batch had been due.
	Lag time.Duration
}

// Row is one row that expires.
type Row struct {
	// ID is the primary key as text.
	ID string
	// Deadline is the moment from which the row counts as expired.
	Deadline time.Time
	// Values holds the further columns that the Store was configured to read, as
	// text in the database's form. A column that is NULL is missing.
	Values map[string]string
}

// BatchError is the failure of a batch that one of its rows may have caused.
// The Sweeper halves such a batch until the row is found.
type BatchError struct {
	// Rows are the ids of the rows that were claimed.
	Rows []string
	// Err is what went wrong.
	Err error
}

// Error implements error.
func (e *BatchError) Error() string {
	return fmt.Sprintf("expiry: batch of %d rows: %v", len(e.Rows), e.Err)
}

// Unwrap returns what went wrong.
func (e *BatchError) Unwrap() error { return e.Err }

// Finding is what the adapters' Check methods return: something that is missing
// or mis-set on the server, and how to mend it.
type Finding = check.Finding

// EventID returns the id of the message that announces an expiry. It is a UUID
// of version 7 whose time is the deadline, and it is the same whenever kind, row
// and deadline (to the microsecond) are: a batch that is run again cannot
// announce the same expiry under a second id. kind is usually the message name.
func EventID(kind, rowID string, deadline time.Time) uuid.UUID {
	return ids.Deterministic(deadline, kind, rowID)
}
