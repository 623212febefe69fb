// Package driver is what a table of records needs that is not idempotencypgx's own.
// The suite in idempotencytest/conformance says what else it must do.
package driver

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// Record is what a business transaction leaves behind for its key.
type Record struct {
	Key         driver.Key
	Token       string // of the claim it was made under
	Fingerprint driver.Fingerprint
	Response    driver.Response
}

// Records is the table of records that a store writes in the business transaction.
type Records interface {
	// Insert stores rec with the transaction. A second record of the key makes
	// the transaction fail, at Insert or at COMMIT.
	Insert(ctx context.Context, tx pgx.Tx, rec Record) error
	// Lookup returns the committed record of the key.
	Lookup(ctx context.Context, key driver.Key) (rec Record, found bool, err error)
	// Resolve is Lookup that first waits for every transaction that has
	// inserted a record of the key and has not ended yet.
	Resolve(ctx context.Context, key driver.Key) (rec Record, found bool, err error)
}
