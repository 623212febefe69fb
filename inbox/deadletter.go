package inbox

import (
	"errors"

	"github.com/holdfast-go/holdfast/internal/deadletter"
)

var (
	// ErrNotFound means that there is no dead letter with the id.
	ErrNotFound = deadletter.ErrNotFound
	// ErrOutlived is in the error of a replay that skipped dead letters because the consumer may no longer
	// remember whether they were processed; see Replay.Force.
	ErrOutlived = deadletter.ErrOutlived
	// ErrHeld is in the error of a call that could not see all dead letters, because another session has some
	// of them in flight, such as a paced replay, or has taken them meanwhile. The result has everything that
	// was seen or done. A later call sees those that have returned. Only RabbitMQ causes it, because it
	// delivers a message to one session at a time. A call does not fail with it if it found each of
	// Filter.IDs, at least one copy, or as many as Filter.Limit.
	ErrHeld = errors.New("inbox: only a part of the dead letters is available: another session holds the rest")
)

// An outbox and a consumer have the same types of dead letters. Package internal/deadletter describes their fields and
// methods.
type (
	// DeadLetters are the messages that a consumer has given up. A consumer's method DeadLetters returns
	// them. Each of its methods can return ErrHeld together with its result. The method Retrying of a consumer returns
	// the messages that wait for an attempt, with the same methods; on NATS there is none.
	//
	//	List(ctx, Filter) ([]DeadLetter, error)
	//	Show(ctx, id uuid.UUID) (DeadLetter, error)
	//	Count(ctx, Filter) (int, error)
	//	Groups(ctx, Filter) ([]Group, error)
	//	Replay(ctx, Filter, Replay) (Replayed, error)
	//	Remove(ctx, Filter, Removal) (int, error)
	DeadLetters = deadletter.DeadLetters[Message]
	// DeadLetter is a message that a consumer gave up. A replay returns it to the Queue of its Message.
	// It has the fields Message, Class, Error, ErrorType, SQLState, Fingerprint, Attempts, CreatedAt, FirstFailedAt,
	// FailedAt, DueAt, Consumer, Omitted, Unreadable and Cursor; go doc
	// github.com/holdfast-go/holdfast/internal/deadletter.DeadLetter describes them.
	DeadLetter = deadletter.DeadLetter[Message]
	// Group are dead letters of one kind.
	// It has the fields Fingerprint, Count, First, Last and Sample.
	Group = deadletter.Group[Message]
	// Filter selects dead letters.
	// It has the fields IDs, Class, Name, Key, Fingerprint, ErrorContains, FailedAfter, FailedBefore, Limit, After and
	// Whole.
	Filter = deadletter.Filter
	// Replay configures a return of dead letters to their queues, and records who did it and why.
	// It has the fields By, Reason, PerSecond, Delay, DryRun, Progress, Edit and Force.
	Replay = deadletter.Replay[Message]
	// Removal records who deletes dead letters, and why.
	// It has the fields By, Reason and Progress.
	Removal = deadletter.Removal
	// Replayed is the outcome of a replay for the dead letters that it selected.
	// It has the fields Returned, Outlived and Failed.
	Replayed = deadletter.Replayed
)
