package driver

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Parking keeps the stopped ordering keys of one consumer: the dead letter that stopped a key, and behind it each
// message of the key that has arrived since, in that order. When the letter is returned or dropped, the messages run one
// after the other. The key is free after the last one. A Parking has each message id once.
//
// It must be safe for concurrent use, in several processes. Each call without a transaction returns within a limit of
// its own. The suite is in inboxtest/conformance.
type Parking interface {
	// DeadLetters are the dead letters that stopped their keys. Return makes one a message again in its place, with Attempt
	// 1 and Replays one higher.
	driver.DeadLetters
	// Stop keeps a dead letter and stops its key. Where the key is stopped already, the message waits at its end as
	// it is. A message that is here already, or that the consumer has recorded, changes nothing.
	Stop(ctx context.Context, key string, dead inbox.DeadLetter) error
	// Wait keeps a message at the end of its key, unless its id is here already. It returns false if the key is not
	// stopped.
	Wait(ctx context.Context, key string, m *inbox.Message) (waits bool, err error)

	// Claim returns the first message of a key that may go on, or nil if there is none. For the time of the lease no
	// other call returns the key. A lease is no lock: Take decides which process runs the message.
	Claim(ctx context.Context, lease time.Duration) (*Head, error)
	// Next is Claim for the key of a head whose message is done.
	Next(ctx context.Context, h *Head, lease time.Duration) (*Head, error)
	// Take removes the message of a head and records it, as part of a transaction, and reports whether it did both.
	// Until the transaction ends no other one can take a message of the key. It makes no entry if the message is not
	// the key's first any more, if another transaction has the key, or if the message was recorded before.
	Take(ctx context.Context, tx pgx.Tx, h *Head) (first bool, err error)
	// Pass removes the message of a head that was recorded before, or that needs no record.
	Pass(ctx context.Context, h *Head) error
	// Retry keeps the message of a head as its next attempt, which may run after a delay. It changes nothing if
	// another process has the message.
	Retry(ctx context.Context, h *Head, next *inbox.Message, delay time.Duration) error
	// Fail makes the message of a head the dead letter that stops its key. It changes nothing if another process has
	// the message.
	Fail(ctx context.Context, h *Head, dead inbox.DeadLetter) error
	// Release ends a claim: the key is free if it has no messages, else it may go on at once.
	Release(ctx context.Context, h *Head) error
	// Count returns how many keys are stopped and how many messages they have, dead letters included. It counts to
	// most at most.
	Count(ctx context.Context, most int) (keys, messages int, err error)
}

// Head is a claim of the first message of a key.
type Head struct {
	Key string
	// Until is the end of the lease, by the clock of the Parking. It tells one claim of a key from another.
	Until time.Time
	// Message is nil if the key has no messages.
	Message *inbox.Message
	// Runs is how many claims of the message were followed by neither Retry nor Fail: the process may have ended while
	// it ran.
	Runs int
}
