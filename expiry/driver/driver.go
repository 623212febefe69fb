// Package driver has the contract of a store for expiry.Sweeper. Users of expiry do not need it. The suite in
// internal/expiry/conformance tests a store.
package driver

import (
	"context"
	"fmt"
	"time"
)

// Store holds the rows that expire. expirypgx.Store keeps them in a Postgres table, expirytest.Store in memory. Many
// goroutines call its methods. A Store may also implement [Fit] and [Background].
type Store interface {
	// SweepBatch expires up to req.Limit active rows past their deadline by the store's clock, longest overdue first,
	// in one transaction. It locks rows that no other transaction holds, changes their status if they are still
	// active and due, and calls the store's callback for them.
	//
	// After an error nothing has changed, unless the outcome of the commit is unknown. A repeated call never expires
	// a row twice. If one of the rows may have caused an error, even by exceeding the deadline of ctx, the error is a
	// *BatchError.
	SweepBatch(ctx context.Context, req Request) (Batch, error)

	// Look returns the next due time, without the rows in skip. It changes nothing.
	Look(ctx context.Context, skip []string) (Outlook, error)
}

// Fit is an optional interface of a Store.
type Fit interface {
	// Fit returns everything to fix before rows can be swept. Each finding has a method Fix() string; several
	// findings are joined. Any other error means that the store could not be read. The Sweeper calls Fit before its
	// first sweep and continues only after Fit has returned nil.
	Fit(ctx context.Context) error
}

// Background is an optional interface of a Store.
type Background interface {
	// Background calls wake whenever a row was made or changed that falls due at time at, or at an unknown time if at
	// is zero. The Sweeper may have called Look before Background receives wake-ups. So Background calls wake with
	// zero when it starts to receive wake-ups of this process. It does so again whenever it starts to receive those
	// of other processes, also after an outage. Background blocks until ctx ends. Every call of Sweeper.Run calls it
	// once and waits for its end. wake never blocks.
	Background(ctx context.Context, wake func(at time.Time))
}

// Request describes one batch.
type Request struct {
	// Limit is the largest number of rows to expire, at least 1.
	Limit int
	// After is the start: only rows behind it are taken. The zero Cursor starts at the longest overdue row.
	After Cursor
	// Skip has the ids of rows that must not be touched.
	Skip []string
	// Only has the ids of the only rows that may be taken, whatever After is. Rows in Skip are still not touched.
	// Optional.
	Only []string
}

// Cursor is a position in the order of rows, by deadline and then by primary key in the store's order. The zero
// Cursor is before all rows.
type Cursor struct {
	Deadline time.Time // zero with an ID means a deadline of -infinity
	ID       string
}

// Batch is the result of one committed batch.
type Batch struct {
	// Claimed is the number of due rows that were locked. In a short batch, with fewer than Limit, all later due rows
	// are taken or locked by others.
	Claimed int
	// Expired is the number of rows whose status was changed. Another transaction settled or locked the other rows
	// first.
	Expired int
	// Last is the position of the last claimed row.
	Last Cursor
	// Lag is how long the longest overdue row of the batch had been due.
	Lag time.Duration
}

// Outlook describes the rows that are still active.
type Outlook struct {
	// Now is the store's clock.
	Now time.Time
	// Pending reports whether there is an active row that is not in skip.
	Pending bool
	// Due is the time from Now until the earliest of these rows falls due. It is zero or negative if that row is
	// already due.
	Due time.Duration
	// Overdue is the number of active rows past their deadline, including those in skip, at most MaxOverdue.
	Overdue int
	// Lag is how long the longest overdue of these rows has been due.
	Lag time.Duration
	// Undated is the number of active rows with a NULL deadline, at most MaxOverdue. They never expire.
	Undated int
}

// MaxOverdue limits Outlook.Overdue and Undated, so that Look stays cheap with very many such rows.
const MaxOverdue = 10_000

// BatchError is the failure of a batch that one of its rows may have caused. The Sweeper sets the rows aside,
// continues with the others, and then halves the batch until the row is found.
type BatchError struct {
	// Rows are the ids of the rows that may be at fault: all claimed rows, or a single row if it is known.
	Rows []string
	// Last is the position of the last claimed row.
	Last Cursor
	// Doubtful means that rows rarely cause such a failure: a lost connection, a full disk, a conflict or a schema
	// error. The failing row is skipped. It does not go to quarantine even if it is alone, and a second such batch
	// ends the sweep.
	Doubtful bool
	// Err is the cause.
	Err error
}

// Error implements error.
func (e *BatchError) Error() string {
	if e.Doubtful {
		return fmt.Sprintf("expiry: batch of %d rows: %v", len(e.Rows), e.Err)
	}
	return fmt.Sprintf("expiry: batch, %d rows may be at fault: %v", len(e.Rows), e.Err)
}

// Unwrap returns the cause.
func (e *BatchError) Unwrap() error { return e.Err }
