// Package driver is for those who implement a store for expiry.Sweeper. Users of
// expiry do not need it. The suite in internal/expiry/conformance tests a store.
package driver

import (
	"context"
	"fmt"
	"time"
)

// Store holds the rows that expire. expirypgx.Store keeps them in a Postgres table,
// expirytest.Store in memory. Methods are called by many goroutines. A Store may
// also implement [Fit] and [Background].
type Store interface {
	// SweepBatch expires up to req.Limit rows that are active and past their
	// deadline by the store's own clock, longest overdue first, in one
	// transaction. It locks rows that nobody else holds, changes their state if
	// they are still active and still due, and emits what follows from it.
	//
	// On an error nothing has changed, unless the outcome of the commit is
	// unknown. A repeated call expires no row twice. An error that one of the
	// rows may have caused, also by taking longer than ctx allows, is a
	// *BatchError.
	SweepBatch(ctx context.Context, req Request) (Batch, error)

	// Look returns what is due next, leaving out the rows in skip. It changes
	// nothing.
	Look(ctx context.Context, skip []string) (Outlook, error)
}

// Fit is an optional interface of a Store.
type Fit interface {
	// Fit returns what must be mended before rows can be swept. Each finding has a
	// method Mend() string, and several are joined. Any other error says that the
	// store could not look. The Sweeper calls Fit before its first sweep and goes on
	// only after it has returned nil.
	Fit(ctx context.Context) error
}

// Background is an optional interface of a Store.
type Background interface {
	// Background calls wake whenever a row was made or changed that falls due at that
	// time, or at an unknown one if at is zero. The Sweeper may have looked before
	// Background hears of rows. Background therefore calls wake with zero when it begins
	// to hear of those of this process, and whenever it begins to hear of those of other
	// processes, after an outage too. Background blocks until ctx ends. Every call of
	// Sweeper.Run calls it once and waits for its end. wake never blocks.
	Background(ctx context.Context, wake func(at time.Time))
}

// Request asks a Store for one batch.
type Request struct {
	// Limit is the largest number of rows to expire, at least 1.
	Limit int
	// After is where to start: only rows behind it are taken. The zero Cursor
	// starts at the longest overdue row.
	After Cursor
	// Skip holds the ids of rows that must not be touched.
	Skip []string
	// Only holds the ids of the only rows that may be taken, wherever After is. Rows
	// in Skip are left alone all the same. Optional.
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
	// Claimed counts the rows that were found due. A short batch, with fewer than
	// Limit, means that every later due row is taken or locked.
	Claimed int
	// Expired counts those whose state was changed. Another transaction settled or
	// locked the others first.
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
	// Pending reports whether there is an active row outside skip.
	Pending bool
	// Due is how long from Now the earliest of those falls due. It is zero or less
	// if that row is due already.
	Due time.Duration
	// Overdue counts the active rows past their deadline, those in skip included. It
	// stops at MaxOverdue.
	Overdue int
	// Lag is how long the longest overdue of them has been due.
	Lag time.Duration
	// Undated counts the active rows whose deadline is NULL. They never expire. It
	// stops at MaxOverdue.
	Undated int
}

// MaxOverdue is how far Outlook.Overdue and Undated count, so that a look stays
// cheap when there are very many such rows.
const MaxOverdue = 10_000

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
