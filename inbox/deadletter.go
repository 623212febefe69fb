package inbox

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/google/uuid"
)

// ErrNotFound is returned where a dead letter of one id is asked for and there is none.
var ErrNotFound = errors.New("inbox: no such dead letter")

// ErrOutlived is in the error of a replay that left dead letters where they are because the
// consumer may no longer remember whether they were processed; see Replay.Force.
var ErrOutlived = errors.New("inbox: dead letters are older than what processed messages are remembered for")

// ErrHeld is in the error of a call that saw a part of the dead letters: another session has the others
// in hand, such as a replay that is paced, or has taken them meanwhile. What was seen is returned, or
// done, and a later call sees what has come back. Only RabbitMQ, which hands out each letter once, causes it.
var ErrHeld = errors.New("inbox: a part of the dead letters only: another session holds the rest")

// DeadLetters are the messages that a consumer has given up. A consumer's method DeadLetters
// returns them. It may be used from many goroutines. Each method can fail with ErrHeld beside its result,
// unless it has found each of Filter.IDs, one copy at least, or as many as Filter.Limit.
type DeadLetters interface {
	// List returns the dead letters that the filter selects and leaves them where they are. They are without
	// the bodies and the headers of their messages, unless Filter.Whole is set. A Filter.Limit of 0 means 100.
	List(ctx context.Context, f Filter) ([]DeadLetter, error)
	// Show returns the whole dead letter with the message id, the latest seen of several, or ErrNotFound;
	// ErrHeld where it may be among those not seen.
	Show(ctx context.Context, id uuid.UUID) (DeadLetter, error)
	// Count returns how many dead letters the filter selects.
	Count(ctx context.Context, f Filter) (int, error)
	// Groups counts the selected dead letters by their fingerprints, the largest group first. At
	// most 1000 kinds are told apart: the others are one group more, without a fingerprint.
	// Filter.Limit bounds the groups.
	Groups(ctx context.Context, f Filter) ([]Group, error)
	// Replay returns the selected dead letters to the queues they came from, as messages that
	// were never tried. It goes no further than what is there when it begins. Those refused for
	// their age stay, and the error is ErrOutlived. What fails once more is a dead letter
	// again: exclude it from a second call with Filter.FailedBefore. Where the connection breaks, it is
	// not known of the last ones whether they went.
	Replay(ctx context.Context, f Filter, how Replay) (Replayed, error)
	// Remove deletes the selected dead letters and returns how many, also with an error. Where the
	// connection breaks, it is not known of the last ones whether they are gone.
	Remove(ctx context.Context, f Filter, r Removal) (int, error)
}

// DeadLetter is a message that was given up, with what is known about why.
type DeadLetter struct {
	// Message is the message as it last arrived. Its Queue is where a replay returns it to.
	Message Message
	// Class is the class of the last failure; it selects the dead-letter queue.
	Class string
	// Error is the text of the last failure, at most 1024 bytes of valid UTF-8. The failures before
	// are in Message.History.
	Error string
	// ErrorType is the Go type of the last failure, such as *pgconn.PgError: the first in its chain
	// that is no wrapper of packages fmt, errors and inbox. SQLState is its SQLSTATE. Both are empty
	// when there is none, or it is not known.
	ErrorType, SQLState string
	// Fingerprint is the same for failures of one kind, in all processes and versions of a program:
	// 16 digits of what Class, ErrorType and SQLState are, with the function that panicked, else the
	// message's name. Where the type tells nothing, as that of errors.New, the error's text counts
	// too, without quotations and what has a digit in it.
	Fingerprint string
	// Attempts is how often the message was tried, the last time included.
	Attempts int
	// FirstFailedAt and FailedAt are the consumer's times of the first and the last failure.
	FirstFailedAt, FailedAt time.Time
	// Consumer names who gave the message up.
	Consumer string
	// Omitted says that List left out the body and the headers of the message.
	Omitted bool
}

// Group are dead letters of one kind.
type Group struct {
	// Fingerprint is that of all of them; Filter.Fingerprint selects them.
	Fingerprint string
	// Count is how many there are.
	Count int
	// First and Last are the earliest and the latest of their last failures.
	First, Last time.Time
	// Sample is the latest of them, without the body and the headers of its message.
	Sample DeadLetter
}

// Filter selects dead letters: those that match all its fields. The zero value selects all. It has no
// cursor, unlike outbox.Filter: letters in a queue have no place that stays theirs.
type Filter struct {
	// IDs are the message ids wanted; those that are no dead letters are passed over. Optional.
	IDs []uuid.UUID
	// Class is the class wanted. Optional.
	Class string
	// Name is the message name wanted. Optional.
	Name string
	// Key is the ordering key wanted. Optional.
	Key string
	// Fingerprint is the kind of failure wanted. Optional.
	Fingerprint string
	// ErrorContains is a text that the error has in it, letter case aside. Optional.
	ErrorContains string
	// FailedAfter and FailedBefore bound the last failure: after ≤ time < before. Optional.
	FailedAfter, FailedBefore time.Time
	// Limit bounds how many are listed, removed or returned; those that a replay leaves where
	// they are do not count. Default: 100 for List, none for the others.
	Limit int
	// Whole has List include bodies and headers, until they are 32 MiB together: it omits those of further
	// letters. Without effect on the others.
	Whole bool
}

// LogValue implements slog.LogValuer with the fields that are set.
func (f Filter) LogValue() slog.Value {
	var attrs []slog.Attr
	text := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	moment := func(key string, value time.Time) {
		if !value.IsZero() {
			attrs = append(attrs, slog.Time(key, value))
		}
	}
	if len(f.IDs) > 0 {
		attrs = append(attrs, slog.Int("ids", len(f.IDs)), slog.Any("first_id", f.IDs[0]))
	}
	text("class", f.Class)
	text("name", f.Name)
	text("key", f.Key)
	text("fingerprint", f.Fingerprint)
	moment("failed_after", f.FailedAfter)
	moment("failed_before", f.FailedBefore)
	text("error_contains", f.ErrorContains)
	if f.Limit > 0 {
		attrs = append(attrs, slog.Int("limit", f.Limit))
	}
	return slog.GroupValue(attrs...)
}

// Replay says who returns dead letters to their queues, and how.
type Replay struct {
	// By and Reason are as in Removal. A DryRun needs no By.
	By, Reason string
	// PerSecond bounds how many are returned each second. Default: no bound.
	PerSecond float64
	// DryRun counts and returns nothing. It does not see that a queue is gone.
	DryRun bool
	// Progress is called after each message, with what became of all until then, by the goroutine that
	// called Replay. Optional.
	Progress func(Replayed)
	// Edit returns the body with which a message goes back, or an error: it stays and counts as failed. A
	// DryRun asks it, too. It must not change what it is given. Optional.
	//
	// A message keeps its id, so that one that was processed after all is not processed again. The bodies
	// of structured CloudEvents, and of what Symfony has wrapped for a Redis stream, cannot be replaced:
	// such messages stay.
	Edit func(Message) ([]byte, error)
	// Force returns those, too, whose id is older than what the consumer remembers. Such a
	// message may have been processed after all, its acknowledgement lost on the way, and would
	// then take effect again.
	Force bool
}

// Removal says who deletes dead letters.
type Removal struct {
	// By names who asks for it and is required, 1 to 128 bytes; Reason is optional, at most 1,000 bytes.
	// Both go to the log, and are UTF-8 without control characters.
	By, Reason string
	// Progress is called after each message, with how many are deleted until then, by the goroutine that
	// called Remove. Optional.
	Progress func(removed int)
}

// Replayed is what became of the dead letters that a replay selected.
type Replayed struct {
	// Returned are in their queues again; with DryRun, would be.
	Returned int
	// Outlived were refused for their age, and stay.
	Outlived int
	// Failed could not be edited or put into their queue, and stay.
	Failed int
}
