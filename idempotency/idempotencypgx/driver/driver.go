// Package driver has the contract of a table of records in place of the table of idempotencypgx. The suite in
// idempotencytest/conformance tests the rest of the contract.
package driver

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// Record is the record that a business transaction stores for its key.
type Record struct {
	Key         driver.Key
	Token       string // the token of the claim
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
	// Resolve is Lookup, but first waits for every open transaction that has inserted a record of the key.
	Resolve(ctx context.Context, key driver.Key) (rec Record, found bool, err error)
}
