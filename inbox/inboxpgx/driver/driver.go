// Package driver defines the store of entries for inboxpgx. Entries are in Postgres unless
// inboxpgx.Config.Entries is set; inboxtest keeps them in memory.
package driver

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Entries records which messages a consumer has processed, as part of a transaction. The suite is in
// inboxtest/conformance. It must be safe for concurrent use.
type Entries interface {
	// Record records the id and reports whether it made an entry. If it made none, the id was recorded
	// before, the ordering key is stopped, or the store ignored the entry: roll tx back and call Recorded,
	// and then Parking. An empty key is never stopped. The entry commits and rolls back with tx. While
	// another transaction that recorded the same id is open, Record waits, or fails in a way that txretry
	// retries.
	Record(ctx context.Context, tx pgx.Tx, consumer string, id uuid.UUID, key string) (first bool, err error)
	// RecordAll is Record for several messages with different ids, in one step. It has a key for each message, or none
	// at all.
	RecordAll(ctx context.Context, tx pgx.Tx, consumer string, msgs []*inbox.Message, keys []string) (first []bool, err error)
	// Recorded reports for each id whether a committed transaction of the consumer has recorded it.
	Recorded(ctx context.Context, consumer string, ids []uuid.UUID) ([]bool, error)
	// Forget deletes, in the same transaction, entries made there by Record or RecordAll. It returns an error
	// if an entry was not deleted.
	Forget(ctx context.Context, tx pgx.Tx, consumer string, ids []uuid.UUID) error
	// Processed returns how many ids the consumer has recorded in the last d: at most 100,000, which means at
	// least that many.
	Processed(ctx context.Context, consumer string, d time.Duration) (int, error)
	// Look returns the times that are known about one message of a consumer. The zero Known means that nothing is known.
	Look(ctx context.Context, consumer string, id uuid.UUID) (Known, error)
	// Ledger returns the ledger of a consumer.
	Ledger(consumer string) driver.Ledger
	// Parking returns the stopped ordering keys of a consumer. The entry of a waiting message must be kept
	// for as long as it waits: the message may be a copy of one that has taken effect.
	Parking(consumer string) Parking
}

// Known are the times that a store has of one message. A zero time means that it has none.
type Known struct {
	// ProcessedAt is when the message took effect.
	ProcessedAt time.Time
	// ParkedAt is when the message was kept behind the dead letter of its ordering key, or as that dead letter. StoppedBy is the
	// dead letter; zero: it was replayed or removed, and the messages of the key run.
	ParkedAt  time.Time
	StoppedBy uuid.UUID
}

// Behind is a message that waits behind the dead letter of its ordering key, without its body.
type Behind struct {
	Message  inbox.Message
	ParkedAt time.Time
}

// ErrFull means that the maximum number of messages waits behind dead letters of their keys.
var ErrFull = fmt.Errorf("inboxpgx: MaxParked messages wait behind dead letters of their keys: replay or remove dead letters: %w", driver.ErrRefused)

// Parking keeps the stopped ordering keys of one consumer: the dead letter that stopped a key, and behind it
// each later message of the key, in order of arrival. When the dead letter is returned or dropped, the
// messages run one after the other. The key is free after the last one. A Parking has each message id once.
//
// A process claims a key to run its messages. A claim ends when another one is made: later calls of its owner
// change nothing.
//
// It must be safe for concurrent use, in several processes. Each call without a transaction bounds its own
// time. The suite is in inboxtest/conformance.
// its own. The suite is in inboxtest/conformance.
type Parking interface {
	// DeadLetters are the dead letters that stopped their keys. Return turns one back into a message in its
	// place, with Attempt 1 and Replays one higher. Drop also records the message, so that a redelivered copy
	// does not run.
	driver.DeadLetters
	// Stop keeps a dead letter and stops its key. If the key is stopped already, the message waits at its end
	// unchanged. If the message is kept here already, or was recorded by the consumer, Stop changes nothing.
	Stop(ctx context.Context, key string, dead inbox.DeadLetter) error
	// Wait keeps a message at the end of its key, unless its id is here already. It returns false if the key
	// is not stopped. With full set it keeps nothing, and returns ErrFull for a message that it would have
	// kept.
	Wait(ctx context.Context, key string, m *inbox.Message, full bool) (waits bool, err error)

	// Claim claims a key that may continue and returns its first message, or nil if there is no such key. No
	// other call returns the key during the lease, or while a transaction has taken the message.
	Claim(ctx context.Context, lease time.Duration) (*Head, error)
	// Next removes the message of a head, which is done, and claims the key's next message. It returns nil if
	// the claim has ended.
	Next(ctx context.Context, h *Head, lease time.Duration) (*Head, error)
	// Take records the message of a head as part of a transaction, and reports whether it made the entry.
	// Nobody can claim the key until the transaction ends. It makes no entry if the claim has ended, or if
	// the message was recorded before.
	Take(ctx context.Context, tx pgx.Tx, h *Head) (first bool, err error)
	// Retry keeps the message of a head as its next attempt, which may run after a delay, and ends the claim.
	Retry(ctx context.Context, h *Head, next *inbox.Message, delay time.Duration) error
	// Fail makes the message of a head the dead letter that stops its key, and ends the claim.
	Fail(ctx context.Context, h *Head, dead inbox.DeadLetter) error
	// Release ends a claim whose message did not run: the key continues before others. The key is free if it
	// has no messages.
	Release(ctx context.Context, h *Head) error
	// Count returns how many keys are stopped and how many messages they have, dead letters included. Each
	// count stops at most.
	Count(ctx context.Context, most int) (keys, messages int, err error)
}

// Head is a claim of the first message of a key.
type Head struct {
	Key string
	// Until is the end of the lease, by the clock of the Parking. It identifies a claim of the key.
	Until time.Time
	// Message is nil if the key has no messages.
	Message *inbox.Message
	// Runs is how many earlier claims of the message ended without a call of their owners: the process may
	// have ended while the message ran.
	Runs int
}
