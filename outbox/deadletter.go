package outbox

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
)

var (
	// ErrNotFound means that there is no dead letter with the id.
	ErrNotFound = errors.New("outbox: no such dead letter")
	// ErrOutlived means that a replay left dead letters where they are because no consumer remembers
	// any more whether it has processed them. Replay.Force returns those, too.
	ErrOutlived = errors.New("outbox: dead letters are older than what consumers remember")
)

// DeadLetters shows and moves the messages that relays gave up. A store has a method that returns
// its own. It is safe for concurrent use.
type DeadLetters interface {
	// List returns the dead letters that f selects, the oldest first. A Filter.Limit of 0 means 100.
	List(ctx context.Context, f Filter) ([]DeadLetter, error)
	// Show returns one dead letter, or ErrNotFound.
	Show(ctx context.Context, id uuid.UUID) (DeadLetter, error)
	// Count returns how many dead letters f selects.
	Count(ctx context.Context, f Filter) (int, error)
	// Groups counts the selected dead letters by their fingerprints, the largest group first.
	// Filter.Limit bounds the groups; 0 means 1,000.
	Groups(ctx context.Context, f Filter) ([]Group, error)
	// Replay moves dead letters back into the outbox with their attempts forgotten. It chooses them when
	// it begins, and moves at most 500 in one transaction, so that others wait for none of it. They keep
	// the order in which they were stored, behind all messages that the outbox holds at that time; what is
	// written meanwhile may come between them. A letter that the store refuses stays, and does not keep the others; the
	// error then names the first such letter. With any other error it returns what became of those before.
	// When the server does not answer, it is not known whether some more moved: calling again does no
	// harm.
	Replay(ctx context.Context, f Filter, r Replay) (Replayed, error)
	// Remove deletes dead letters, the oldest first, and returns how many, also with an error. It chooses
	// them when it begins, and deletes at most 500 in one transaction. A letter that the store refuses stays, as in Replay.
	Remove(ctx context.Context, f Filter, r Removal) (int, error)
}

// DeadLetter is a message that a relay gave up.
type DeadLetter struct {
	Message
	// Class is the kind of the last failure, such as "permanent", "unroutable" or "quarantined".
	Class string
	// Error is the text of the last failure, at most 1,000 bytes.
	Error string
	// Fingerprint is the same for failures of one kind: 16 digits of what Class, Transport, the
	// message's name and Error are, the error without quotations and what has a digit in it.
	Fingerprint string
	// Attempts counts the attempts to publish that failed.
	Attempts int
	// CreatedAt is when the message was stored, and FailedAt when it became a dead letter. Both are
	// times of the store's clock, and zero where another program has made them infinite.
	CreatedAt, FailedAt time.Time
	// Unreadable says why the Message is not complete: another program stored what is no message, or
	// the bodies of one List are more than 32 MiB together. Nil: it is complete. Replay moves what is
	// stored.
	Unreadable error
	// Cursor is where the dead letter is in a List: as Filter.After of another it has that one go on behind
	// it, also when the dead letter is gone. Only the store can read it.
	Cursor string
}

// Group are dead letters of one kind.
type Group struct {
	// Fingerprint is that of all of them; Filter.Fingerprint selects them.
	Fingerprint string
	// Count is how many there are.
	Count int
	// First and Last are the earliest and the latest of their failures.
	First, Last time.Time
	// Sample is the latest of them, without its body and its headers.
	Sample DeadLetter
}

// Filter selects dead letters: those that match every field that is set. The zero Filter selects all.
type Filter struct {
	// IDs selects by id, at most 10,000; those that are no dead letters are passed over. Optional.
	IDs []uuid.UUID
	// Class, Name and Key select what equals them. Optional.
	Class, Name, Key string
	// Fingerprint selects failures of one kind. Optional.
	Fingerprint string
	// ErrorContains selects by a part of the error's text. Case matters. At most 1,000 bytes. Optional.
	ErrorContains string
	// FailedAfter and FailedBefore bound when the message became a dead letter. FailedAfter is
	// included, FailedBefore is not. Optional.
	FailedAfter, FailedBefore time.Time
	// Limit is the most dead letters, the oldest first. Default: 100 for List, 1,000 for
	// Groups, none for the others.
	Limit int
	// After is the Cursor of a dead letter: List begins behind it. Optional, and refused by all but List.
	// A letter whose transaction commits while one pages may lie before the place that is reached: a List
	// that begins again shows it.
	After string
}

// Replay says who returns dead letters to the outbox, and how.
type Replay struct {
	// By and Reason are as in Removal. A DryRun needs no By.
	By, Reason string
	// PerSecond bounds how many leave each second. Default: no bound.
	PerSecond float64
	// DryRun counts and moves nothing.
	DryRun bool
	// Progress is called after each step, with what became of all until then, by the goroutine that called
	// Replay. A DryRun has steps where it edits. Optional.
	Progress func(Replayed)
	// Edit returns the body with which a message goes back, or an error: it stays and counts as failed. A
	// DryRun asks it, too. It must not change what it is given. Messages keep their ids. With it they
	// move 20 at a time. Optional.
	Edit func(Message) ([]byte, error)
	// Force returns those, too, that were stored more than 8 days ago. Such a message may have been
	// published after all, its confirm lost on the way, and its consumers remember no longer whether
	// they have processed it.
	Force bool
}

// Removal says who deletes dead letters.
type Removal struct {
	// By names who asks for it and is required, 1 to 128 bytes; Reason is optional, at most 1,000 bytes.
	// Both are UTF-8 without control characters, and kept in an audit.
	By, Reason string
	// Progress is called after each step, with how many are deleted until then, by the goroutine that
	// called Remove. Optional.
	Progress func(removed int)
}

// Replayed is what became of the dead letters that a replay selected.
type Replayed struct {
	// Returned are in the outbox again; with DryRun, would be.
	Returned int
	// Outlived were refused for their age, and stay. The error of Replay is then ErrOutlived.
	Outlived int
	// Failed could not be edited, or the outbox holds their id again or refuses them. They stay.
	Failed int
}

// Waiting is a message that an outbox holds and that is not published. Stores have a method Waiting
// that lists them.
type Waiting struct {
	Message
	// CreatedAt is when it was stored, and DueAt when its attempt is due, both by the store's clock. A
	// zero DueAt: it is ready, or follows the one before it in its key.
	CreatedAt, DueAt time.Time
	// Attempts counts those that failed; Class and Error say what the last one met.
	Attempts     int
	Class, Error string
	// Unreadable is as in DeadLetter.
	Unreadable error
	// Cursor is where the message is in the list of those that are parked, or of the others: as
	// WaitingFilter.After of the same list it has that begin behind it, also when the message is gone.
	// Only the store can read it.
	Cursor string
}

// WaitingFilter selects messages of an outbox: those that match every field that is set.
type WaitingFilter struct {
	// Parked selects those that wait for their first or their next attempt, by the time when they are
	// due. Otherwise those are selected that are ready, and those that follow a parked one of their key, as
	// they were stored.
	Parked bool
	// Name and Key select what equals them. Optional.
	Name, Key string
	// Limit is the most messages. Default: 100.
	Limit int
	// After is the Cursor of a message: the list begins behind it. Optional. A message that is committed, or
	// parked, while one pages may lie before the place that is reached: a list that begins again shows it.
	After string
}
