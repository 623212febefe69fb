package driver

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

// Source is one queue, stream or partition as one consumer sees it. It is what a transport
// implements; package inbox/engine does everything that is not the broker's own. The suite is
// conformance.TestSource in package inboxtest/conformance.
//
// Its methods may be called from any goroutine. Each call returns within the source's own limit of
// time, also when the server has fallen silent; a Move may take some times as long.
type Source interface {
	// Traits returns what the engine must know of the transport. They never change.
	Traits() Traits
	// Open begins a session, which may dial. Nothing is delivered yet. No two sessions of a Source
	// are open at once. A queue that does not exist is ErrMissing.
	Open(ctx context.Context) (Session, error)
	// Move stores a copy of each message elsewhere, durably, and returns one result for each, in
	// the same order. It needs no session, but where Traits.MoveSettles is set it also ends the
	// original, in the same step. A failure concerns its message alone unless it is ErrUnavailable,
	// and loses nothing: the original is still there.
	Move(ctx context.Context, moves []Move) []error
	// Run does what the source needs besides its sessions, such as keeping a connection for copies,
	// until ctx ends. It returns within 2 seconds then, with nothing left behind. Moves work only
	// while it runs.
	Run(ctx context.Context)
	// Ready returns nil while Move can work.
	Ready(ctx context.Context) error
}

// Session is one stretch of deliveries. One goroutine calls Start, Receive, Stop and Close; Ack and
// GiveBack may be called by several others meanwhile. After an error of Receive the session delivers
// nothing more; it must still be closed.
type Session interface {
	// Start has messages delivered: at most window of those that come from now on are unsettled at
	// a time. It may be called again after Stop.
	Start(ctx context.Context, window int) error
	// Receive waits for a message and returns those that are there, at most so many. They come at
	// least once: what is never settled comes again, here or elsewhere. It returns within a second
	// after ctx has ended, with ctx's error unless there are messages. Any other error ends the session.
	Receive(ctx context.Context, most int) ([]Delivery, error)
	// Ack ends messages: they have taken effect, or a copy of them is stored elsewhere. It touches
	// no other delivery. ErrStale says that some of them come again. With mayWait the handlers have
	// enough to do without the places that these take in the window: the server may be told a little
	// later, by Close at the latest.
	Ack(ctx context.Context, ds []Delivery, mayWait bool) error
	// GiveBack has messages come again within 2 seconds, here or elsewhere, uncounted and unchanged.
	GiveBack(ctx context.Context, ds []Delivery) error
	// Stop ends the deliveries, not the session: what Receive has not returned goes back, what it
	// has returned can still be settled.
	Stop(ctx context.Context) error
	// Close ends the session. All that is unsettled goes back together and in its order.
	Close(ctx context.Context) error
}

// Delivery is one hand-out of a message. It is a pointer to what the transport needs to settle it,
// and knows its session.
type Delivery interface {
	// Message returns the message as it arrived, always the same one. Nobody but the engine changes it.
	Message() *inbox.Message
}

// SlowDelivery is an optional interface of a Delivery. The engine asks it on the goroutine that receives, before Message.
type SlowDelivery interface {
	Delivery
	// Slow reports, at once, whether Message decodes a large body. The engine then calls Message on another
	// goroutine, unless the consumer is ordered.
	Slow() bool
}

// Target is where a Move takes a message.
type Target int

// The targets.
const (
	// ToLater is this consumer alone, not before Move.Delay and at most 1.5 times that and 1.5 s
	// later; no other consumer of the same messages gets it.
	ToLater Target = iota + 1
	// ToTail is the end of the consumer's own queue, where ToLater is refused.
	ToTail
	// ToDead is the place of the dead letters of Move.DeadLetter's class, or of the class default
	// where that has none.
	ToDead
)

// Move takes one message elsewhere.
type Move struct {
	Delivery Delivery
	Target   Target
	// Delay is how long ToLater waits; any. A transport with fixed steps takes several by itself,
	// and the engine never sees a message that only passes through.
	Delay time.Duration
	// PutOff says that the message has not failed: for ToLater, where a transport counts those apart.
	PutOff bool
	// Next is what the copy carries for ToLater and ToTail.
	Next Progress
	// DeadLetter is the dead letter that the copy is, for ToDead.
	DeadLetter inbox.DeadLetter
}

// Progress is what a message carries of its attempts.
type Progress struct {
	Attempt, Recovered int
	FirstFailedAt      time.Time
	History            []inbox.FailedAttempt
}

// Traits are what the engine must know of a transport.
type Traits struct {
	// System is the messaging.system of OpenTelemetry's semantic conventions, such as rabbitmq.
	System string
	// MaxWindow is the largest window that Start takes.
	MaxWindow int
	// Hold is how long a delivery may stay unsettled before the broker takes it back; 0: it never does.
	Hold time.Duration
	// MoveSettles says that Move also ends the original, atomically.
	MoveSettles bool
	// FewPlaces says that of the classes of this SDK only default has a place for its dead letters. Those of the
	// others are there, too.
	FewPlaces bool
	// Exclusive says that one session at a time is served, over all processes, and that Close
	// keeps the order. Ordered consumers need it.
	Exclusive bool
}

// The errors of sources and sessions, to be looked for with errors.Is. Others are a session's end,
// or concern one message.
var (
	// ErrRefused is returned by Move for a place that takes nothing: it is missing, full or closed
	// to this user. It is in a processor's error for a message that its store has no room for.
	ErrRefused = errors.New("the place for failed messages takes none")
	// ErrTooLarge is returned by Move for a message that does not fit even without the sender's headers.
	ErrTooLarge = errors.New("the message is too large to be moved")
	// ErrStale says that a delivery is no longer this session's: the broker delivers it again, or
	// has given it to somebody else.
	ErrStale = errors.New("the session of the delivery is over")
	// ErrMissing is returned where the queue, stream or group does not exist.
	ErrMissing = errors.New("the queue does not exist: call Setup")
	// ErrNotEditable is what a dead letter fails with whose body is only a part of what was sent.
	ErrNotEditable = errors.New("the body of the message cannot be replaced")
	// ErrDone ends a scan of DeadLetters without an error.
	ErrDone = errors.New("enough")
)

// Measured is an optional interface of a Source that counts its messages.
type Measured interface {
	// Backlog counts the messages that no consumer has. It looks at none of them.
	Backlog(ctx context.Context) (Backlog, error)
}

// Backlog is what inbox.Stats says of messages that are no dead letters.
type Backlog struct {
	Waiting  int // nobody has them
	Retrying int // failed, and wait for their next attempt
	PutOff   int // wait, and have not failed
}

// Keeper is an optional interface of a Source that can reach its consumer's dead letters. The engine
// counts them for a gauge.
type Keeper interface {
	// DeadLetters returns the dead letters; it asks no server.
	DeadLetters() DeadLetters
}

// Outcome is what becomes of a dead letter that was looked at.
type Outcome int

// The outcomes.
const (
	// Keep leaves the dead letter where it is.
	Keep Outcome = iota
	// Drop deletes it.
	Drop
	// Return puts the message into the queue it came from, Attempt 1 and Replays one higher, and
	// then deletes the dead letter.
	Return
)

// Depth is how many dead letters of a class there are.
type Depth struct {
	Class    string
	Messages int
	// Held says that a session may have further ones in hand, which Messages leaves out.
	Held bool
	// Oldest is the time of the oldest one's last failure; zero when the transport cannot tell.
	Oldest time.Time
}

// DeadLetters are the dead letters of one consumer as a transport keeps them. NewDeadLetters makes
// inbox.DeadLetters of them. Its methods may be called from any goroutine.
type DeadLetters interface {
	// Depths returns one Depth for each class, sorted by class. A place that does not exist is empty.
	Depths(ctx context.Context) ([]Depth, error)
	// Scan visits the dead letters of a class that are there when it begins, oldest first, and does
	// what visit says before it visits the next one. Two scans at once return nothing twice. It ends
	// with visit's first error, of which the dead letter is kept, or with its own; visit returns ErrDone
	// to end it without one. A Return or Drop that fails concerns its dead letter: it is kept, and failed
	// is called. One that would fail for all ends the scan as well. The body of a dead letter that returns
	// may be replaced by visit; a transport that cannot send it so calls failed with ErrNotEditable.
	//
	// A scan that has come to its end and did not visit dead letters that another session has in hand returns
	// inbox.ErrHeld. One that is cut off gives back what it has before it returns, as far as it can.
	Scan(ctx context.Context, class string, visit func(*inbox.DeadLetter) (Outcome, error), failed func(inbox.DeadLetter, error)) error
}
