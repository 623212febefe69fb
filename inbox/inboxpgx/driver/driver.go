// Package driver has what a store of entries for inboxpgx implements. The entries are in Postgres
// unless inboxpgx.Config.Entries says otherwise; inboxtest keeps them in memory.
package driver

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Entries records which messages a consumer has processed, as part of a transaction. The suite is
// in inboxtest/conformance. It must be safe for concurrent use.
type Entries interface {
	// Record reports whether this is the first time that the consumer records the id,
	// and records it. The entry commits and rolls back with tx. While another transaction
	// that recorded the same id is open it waits, or fails so that txretry tries again.
	Record(ctx context.Context, tx pgx.Tx, consumer string, id uuid.UUID) (first bool, err error)
	// RecordAll is Record for several messages with different ids, in one step.
	RecordAll(ctx context.Context, tx pgx.Tx, consumer string, msgs []*inbox.Message) (first []bool, err error)
	// Forget takes back, within the same transaction, what Record or RecordAll has
	// recorded there for the first time.
	Forget(ctx context.Context, tx pgx.Tx, consumer string, ids []uuid.UUID) error
	// Processed returns how many ids the consumer has recorded in the last d: at most 100,000, which means as many
	// or more.
	Processed(ctx context.Context, consumer string, d time.Duration) (int, error)
	// Ledger returns the ledger of a consumer.
	Ledger(consumer string) driver.Ledger
	// Parking returns where the ordering keys of a consumer wait. The entry of a message there must be kept
	// for as long as it waits: it may be a copy of one that has taken effect.
	Parking(consumer string) driver.Parking
}
