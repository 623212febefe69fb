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
	// Record records the id and reports whether it made an entry. If it made none, the id was recorded
	// before, the ordering key is stopped, or the store ignored the entry: roll tx back and ask Recorded, and then
	// Parking. An empty key is never stopped. The entry commits and rolls back with tx. While another transaction that
	// recorded the same id is open it waits, or fails so that txretry tries again.
	Record(ctx context.Context, tx pgx.Tx, consumer string, id uuid.UUID, key string) (first bool, err error)
	// RecordAll is Record for several messages with different ids, in one step. It has a key for each message, or none
	// at all.
	RecordAll(ctx context.Context, tx pgx.Tx, consumer string, msgs []*inbox.Message, keys []string) (first []bool, err error)
	// Recorded reports for each id whether a committed transaction of the consumer has recorded it.
	Recorded(ctx context.Context, consumer string, ids []uuid.UUID) ([]bool, error)
	// Forget deletes, within the same transaction, entries that Record or RecordAll has made there. It
	// returns an error if one of them stays.
	Forget(ctx context.Context, tx pgx.Tx, consumer string, ids []uuid.UUID) error
	// Processed returns how many ids the consumer has recorded in the last d: at most 100,000, which means as many
	// or more.
	Processed(ctx context.Context, consumer string, d time.Duration) (int, error)
	// Ledger returns the ledger of a consumer.
	Ledger(consumer string) driver.Ledger
	// Parking returns the stopped ordering keys of a consumer. The entry of a message there must be kept
	// for as long as it waits: it may be a copy of one that has taken effect.
	Parking(consumer string) Parking
}
