package driver

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

// Source is one queue, stream or partition of one consumer. A transport implements it; package inbox/engine
// does everything that is the same for all brokers. The suite is conformance.TestSource in package
// inboxtest/conformance.
//
// Its methods may be called from any goroutine. Each call returns within the source's own time limit, even if
// the server does not answer. A Move may take a few times as long.
type Source interface {
	// Traits returns the properties of the transport. They never change.
	Traits() Traits
	// Open opens a session; it may dial. Nothing is delivered yet. Only one session of a Source is open at a
	// time. If the queue does not exist, Open returns ErrMissing.
	Open(ctx context.Context) (Session, error)
	// Move stores a copy of each message elsewhere, durably, and returns one result per move, in the same
	// order. It needs no session. If Traits.MoveSettles is set, it also settles the original in the same
	// step. An error concerns its own message only, unless it is ErrUnavailable. After an error the original
	// is still there.
	Move(ctx context.Context, moves []Move) []error
	// Run does the background work of the source, such as keeping a connection for copies, until ctx ends.
	// Then it returns within 2 seconds and leaves no goroutine. Moves work only while it runs.
	Run(ctx context.Context)
	// Ready returns nil if Move can work.
	Ready(ctx context.Context) error
}

// Session is one period of deliveries. One goroutine calls Start, Receive, Stop and Close; several others may
// call Ack and GiveBack at the same time. After an error of Receive the session delivers nothing more, but it
// must still be closed.
type Session interface {
	// Start starts the deliveries. At most window of the messages delivered from now on are unsettled at a
	// time. It may be called again after Stop.
	Start(ctx context.Context, window int) error
	// Receive waits for a message and returns the available ones, at most most of them. Delivery is at least
	// once: an unsettled message is redelivered, here or elsewhere. Receive returns within a second after ctx
	// has ended, with ctx's error unless there are messages. Any other error ends the session.
	Receive(ctx context.Context, most int) ([]Delivery, error)
	// Ack acknowledges messages that have taken effect or have a copy stored elsewhere. It touches no other
	// delivery. ErrStale means that some of them will be redelivered. With mayWait the handlers have enough
	// work without the freed places in the window, so the ack may be sent a little later, by Close at the
	// latest.
	Ack(ctx context.Context, ds []Delivery, mayWait bool) error
	// GiveBack requeues messages uncounted and unchanged. They are redelivered within 2 seconds, here or
	// elsewhere.
	GiveBack(ctx context.Context, ds []Delivery) error
	// Stop ends the deliveries, not the session. Messages that Receive has not returned are requeued; the
	// returned ones can still be settled.
	Stop(ctx context.Context) error
	// Close ends the session. All unsettled messages are requeued together, in their order.
	Close(ctx context.Context) error
}

// Delivery is one delivery of a message. It is a pointer to the data that the transport needs to settle it,
// and refers to its session.
type Delivery interface {
	// Message returns the message as it arrived, always the same pointer. Only the engine changes it.
	Message() *inbox.Message
}

// SlowDelivery is an optional interface of a Delivery. The receiving goroutine calls Slow before Message.
type SlowDelivery interface {
	Delivery
	// Slow reports whether Message decodes a large body. It must not block. If it returns true, the engine
	// calls Message on another goroutine, unless the consumer is ordered.
	Slow() bool
}

// Target is the destination of a Move.
type Target int

// The targets.
const (
	// ToLater delivers the message to this consumer only. It comes not before Move.Delay, and at most 1.5
	// times Move.Delay plus 1.5 s later. No other consumer of the same messages gets it.
	ToLater Target = iota + 1
	// ToTail is the end of the consumer's own queue. It is used when ToLater was rejected.
	ToTail
	// ToDead is the dead-letter queue of Move.DeadLetter's class, or of the class default if that class has
	// none.
	ToDead
)

// Move is a request to store a copy of one message elsewhere.
type Move struct {
	Delivery Delivery
	Target   Target
	// Delay is the delay of ToLater, of any length. A transport with fixed steps chains several by itself;
	// the engine does not see the message in between.
	Delay time.Duration
	// PutOff means that the message has not failed. It applies to ToLater on transports that count such
	// messages apart.
	PutOff bool
	// Next is the progress stored in the copy, for ToLater and ToTail.
	Next Progress
	// DeadLetter is the dead letter to store, for ToDead.
	DeadLetter inbox.DeadLetter
}

// Progress is a message's record of its attempts.
type Progress struct {
	Attempt, Recovered int
	FirstFailedAt      time.Time
	History            []inbox.FailedAttempt
}

// Traits are the properties of a transport that the engine needs.
type Traits struct {
	// System is the messaging.system of OpenTelemetry's semantic conventions, such as rabbitmq.
	System string
	// MaxWindow is the largest window that Start accepts.
	MaxWindow int
	// Hold is how long a delivery may stay unsettled before the broker takes it back; 0 means without limit.
	Hold time.Duration
	// MoveSettles means that Move also settles the original, atomically.
	MoveSettles bool
	// FewPlaces means that of the SDK's classes only default has a dead-letter queue by itself. Dead letters
	// of the other classes go there, too.
	FewPlaces bool
	// Exclusive means that only one session is served at a time, over all processes, and that Close keeps the
	// order. Ordered consumers need it.
	Exclusive bool
}

// The errors of sources and sessions, to be tested with errors.Is. Any other error ends the session, or
// concerns one message.
var (
	// ErrRefused is returned by Move if the destination is missing, full or closed to this user. A processor
	// returns it for a message that its store has no room for.
	ErrRefused = errors.New("the destination rejected the message")
	// ErrTooLarge is returned by Move for a message that is too large even without the sender's headers.
	ErrTooLarge = errors.New("the message is too large to move")
	// ErrStale means that a delivery no longer belongs to the session. The broker redelivers it, or has
	// delivered it to another session.
	ErrStale = errors.New("the session of the delivery has ended")
	// ErrMissing is returned if the queue, stream or group does not exist.
	ErrMissing = errors.New("the queue does not exist: call Setup")
	// ErrGone is the error of an outcome for a message that left between the scan's read and the outcome: a waiting
	// message was delivered, or another call has returned or removed the message.
	ErrGone = errors.New("the message is no longer there")
	// ErrNotEditable is the error of an edit if the dead letter's body is only a part of the sent body.
	ErrNotEditable = errors.New("the body of the message cannot be replaced")
	// ErrDone ends a scan of DeadLetters without an error.
	ErrDone = errors.New("scan ended")
)

// Measured is an optional interface of a Source that counts its messages.
type Measured interface {
	// Backlog counts the messages that no consumer has. It looks at none of them.
	Backlog(ctx context.Context) (Backlog, error)
}

// Backlog has the counts of inbox.Stats for messages that are not dead letters.
type Backlog struct {
	Waiting  int // delivered to no consumer
	Retrying int // failed, waiting for the next attempt
	PutOff   int // waiting, without a failure
}

// Keeper is an optional interface of a Source with access to its consumer's dead letters. The engine counts
// them for a gauge.
type Keeper interface {
	// DeadLetters returns the dead letters. It asks no server.
	DeadLetters() DeadLetters
}

// Delayer is an optional interface of a Source that can show the messages of its consumer that wait for a time.
type Delayer interface {
	// Retrying returns them as dead letters of the classes WaitingRetry and WaitingPutOff, made by NewWaiting; the
	// class comes first that is first in the alphabet. It asks no server. In contrast to dead letters:
	//
	//   - Return makes a message due at its DueAt, which visit may set, and keeps its attempts. A transport with fixed
	//     steps may deliver it as late as Move does.
	//   - The body cannot be replaced.
	//   - A Scan may start with any message, but visits none twice. It calls failed with ErrGone for a message that is
	//     delivered or removed before its outcome is applied.
	//   - A message whose copy the transport stores before it deletes the original may be there twice if the connection
	//     is lost. None is lost.
	Retrying() DeadLetters
}

// The classes of waiting messages.
const (
	WaitingPutOff = "put-off" // waits without a failure
	WaitingRetry  = "retry"   // failed, and waits for the next attempt
)

// Outcome is the decision about a dead letter.
type Outcome int

// The outcomes.
const (
	// Keep leaves the dead letter where it is.
	Keep Outcome = iota
	// Drop deletes it.
	Drop
	// Return puts the message into the queue it came from, with Attempt 1 and Replays one higher, and then
	// deletes the dead letter. For a waiting message see Delayer.
	Return
)

// Depth is the number of dead letters of a class.
type Depth struct {
	Class    string
	Messages int
	// Held means that another session may have more of them in flight. Messages does not include those.
	Held bool
	// Oldest is the oldest time of a last failure; zero if the transport does not know it.
	Oldest time.Time
}

// DeadLetters are the dead letters of one consumer as a transport stores them. NewDeadLetters wraps them as
// inbox.DeadLetters. Its methods may be called from any goroutine.
type DeadLetters interface {
	// Depths returns one Depth per class, sorted by class. A queue that does not exist counts as empty.
	Depths(ctx context.Context) ([]Depth, error)
	// Scan calls visit for the dead letters of a class that exist when it starts, oldest first. It applies the outcome of
	// each before it visits the next one. Two scans at the same time return no dead letter twice: a scan calls failed with
	// ErrGone for a dead letter that another call has returned or removed. Scan ends with the first error of visit, and
	// keeps that dead letter, or with an error of its own. Visit returns ErrDone to end the scan without an error. If a
	// Return or Drop fails for one dead letter, the dead letter is kept and failed is called. If it would fail for all, the
	// scan ends. Visit may replace the body of a dead letter that it returns; a transport that cannot send the new body
	// calls failed with ErrNotEditable.
	//
	// A complete scan returns inbox.ErrHeld if another session had dead letters in flight that it did not
	// visit. A scan that is interrupted requeues its own deliveries before it returns, as far as it can.
	Scan(ctx context.Context, class string, visit func(*inbox.DeadLetter) (Outcome, error), failed func(inbox.DeadLetter, error)) error
}
