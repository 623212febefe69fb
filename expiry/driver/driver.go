// Package driver is for those who implement a store of [expiry.Sweeper]. Users of
// expiry need nothing of it. The suite in expirytest/conformance tests a store.
//
// [expiry.Sweeper]: https://pkg.go.dev/github.com/holdfast-go/holdfast/expiry#Sweeper
package driver

import (
	"context"
	"time"
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
