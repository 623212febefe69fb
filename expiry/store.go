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
//
// If a Store also has the method
//
//	Check(ctx context.Context) ([]Finding, error)
//
// the Sweeper calls it before its first sweep, and works only when there is
// nothing to mend.
type Store interface {
	// SweepBatch expires up to req.Limit rows that are active and past their
	// deadline by the store's own clock, longest overdue first, in one
	// transaction: it locks rows that nobody else holds, changes their state if
	// they are still active and still due, and emits what follows from it.
	//
	// On an error nothing has changed, unless the outcome of the commit is
	// unknown; a repeated call expires no row twice. An error that one of the
	// rows may have caused, also by taking longer than ctx allows, is a
	// *BatchError.
	SweepBatch(ctx context.Context, req Request) (Batch, error)

	// Look returns what is due next, leaving out the rows in skip. It changes
	// nothing.
	Look(ctx context.Context, skip []string) (Outlook, error)
}

// Request asks a Store for one batch.
type Request struct {
	// Limit is the largest number of rows to expire, at least 1.
	Limit int
	// After is where to start: only rows behind it are taken. The zero Cursor
	// starts at the longest overdue.
	After Cursor
	// Skip holds the ids of rows that must not be touched.
	Skip []string
	// Only, unless empty, holds the ids of the only rows that may be taken, wherever
	// After is. Those in Skip are left alone all the same.
	Only []string
}

// Cursor is a place in the order of rows, by deadline and then by primary key
// as the store orders it. The zero Cursor stands before all rows.
type Cursor struct {
	Deadline time.Time // zero with an ID stands for a deadline of -infinity
	ID       string
}

// Batch is what one committed batch did.
type Batch struct {
	// Claimed counts the rows that were found due. Fewer than asked for means
	// that nothing else behind After is due that nobody else is working on.
	Claimed int
	// Expired counts those whose state was changed. The others were raced for:
	// another transaction settled or locked them first.
	Expired int
	// Last is the place of the last row claimed.
	Last Cursor
	// Lag is how long the longest overdue row of the batch had been due.
	Lag time.Duration
}

// Outlook is what a Store knows about the rows that are still active.
type Outlook struct {
	// Now is the store's clock.
	Now time.Time
	// Pending tells whether there is an active row outside skip.
	Pending bool
	// Due is how long from Now the earliest of those falls due; zero or less if
	// it is due already.
	Due time.Duration
	// Overdue counts the active rows past their deadline, those in skip too. It
	// stops at MaxOverdue.
	Overdue int
	// Lag is how long the longest overdue of them has been due.
	Lag time.Duration
	// Undated counts the active rows whose deadline is NULL, and which therefore
	// never expire. It stops at MaxOverdue.
	Undated int
}

// MaxOverdue is how far Outlook.Overdue and Undated count, so that a look stays
// cheap when there are very many such rows.
const MaxOverdue = 10_000

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
// The Sweeper sets the rows aside, goes on with the others, and then halves the
// batch until the row is found.
type BatchError struct {
	// Rows are the ids of the rows that may be at fault: those that were claimed,
	// or one of them if it is known to be that.
	Rows []string
	// Last is the place of the last row that was claimed.
	Last Cursor
	// Doubtful says that it was nothing a row usually causes, such as a lost
	// connection, a full disk, a conflict or an error of the schema. A row that fails
	// so is passed by, but is not accused and stays out of quarantine even if it is
	// alone, and a second such batch ends the sweep.
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
