package inbox

import (
	"errors"

	"github.com/holdfast-go/holdfast/internal/deadletter"
)

var (
	// ErrNotFound means that there is no dead letter with the id.
	ErrNotFound = deadletter.ErrNotFound
	// ErrOutlived is in the error of a replay that left dead letters where they are because the consumer may no longer remember
	// whether they were processed; see Replay.Force.
	ErrOutlived = deadletter.ErrOutlived
	// ErrHeld is in the error of a call that saw a part of the dead letters: another session has the others in flight, such as a
	// replay that is paced, or has taken them meanwhile. The result has what was seen or done, and a later call sees those that
	// have come back. Only RabbitMQ, which hands out each message once, causes it. No call fails with it that has found each
	// of Filter.IDs, one copy at least, or as many as Filter.Limit.
	ErrHeld = errors.New("inbox: a part of the dead letters only: another session holds the rest")
)

// DeadLetters, and what its methods take and return, are the same for a consumer and for an outbox.
type (
	// DeadLetters are the messages that a consumer has given up. A consumer's method DeadLetters returns them. Each of its
	// methods can fail with ErrHeld beside its result.
	DeadLetters = deadletter.DeadLetters[Message]
	// DeadLetter is a message that a consumer gave up. The Queue of its Message is where a replay returns it to.
	DeadLetter = deadletter.DeadLetter[Message]
	// Group are dead letters of one kind.
	Group = deadletter.Group[Message]
	// Filter selects dead letters.
	Filter = deadletter.Filter
	// Replay says who returns dead letters to their queues, and how.
	Replay = deadletter.Replay[Message]
	// Removal says who deletes dead letters.
	Removal = deadletter.Removal
	// Replayed is what became of the dead letters that a replay selected.
	Replayed = deadletter.Replayed
)
