package driver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// The classes of this SDK. Handlers add their own by inbox.Classed.
const (
	ClassDefault       = "default"            // failed too often
	ClassValidation    = base.ClassValidation // undecodable, unknown name, no valid id
	ClassUnrecoverable = "unrecoverable"      // the handler said so
	ClassQuarantined   = "quarantined"        // ends the process again and again; not run any more
)

// The limits of a message.
const (
	MaxNameBytes  = base.MaxNameBytes // AMQP allows no longer one either
	MaxBodyBytes  = base.MaxBodyBytes // RabbitMQ's own bound since 4.0
	MaxErrorBytes = 1024              // of the error text that a dead letter keeps
)

// ErrUnavailable is inside every error of inbox.Unavailable: a server that processing needs is
// down. Returned itself it means the same.
var ErrUnavailable = base.ErrUnavailable

// ValidClass reports whether a text can be a class: 1 to 64 of a-z, 0-9, dot, hyphen, underscore.
func ValidClass(class string) bool { return base.ValidClass(class) }

// NewContext returns a context from which inbox.FromContext takes the message in hand. An
// inbox.Mux makes one for its handlers; other processors call this.
func NewContext(ctx context.Context, m *inbox.Message) context.Context {
	return base.NewContext(ctx, m)
}

// Action is what becomes of a message that was not processed.
type Action int

// The actions.
const (
	// ActionRetry delivers the message again after a delay, other messages meanwhile.
	ActionRetry Action = iota + 1
	// ActionDead moves the message to the dead-letter queue of its class.
	ActionDead
	// ActionReturn gives the message back to its queue as it was.
	ActionReturn
)

// String returns the action's name.
func (a Action) String() string {
	switch a {
	case ActionRetry:
		return "retry"
	case ActionDead:
		return "dead"
	case ActionReturn:
		return "return"
	default:
		return "none"
	}
}

// Failure is what Classify reads out of an error. Next turns it into a Decision.
type Failure struct {
	// Err is the error itself, or says that its methods panic.
	Err error
	// Class selects the dead-letter queue.
	Class string
	// Action is ActionRetry, which the policy may turn into ActionDead, ActionDead or ActionReturn.
	Action Action
	// After is the delay the error asks for; 0 leaves it to the policy.
	After time.Duration
	// Counted says that the failure is the message's own and raises its Attempt.
	Counted bool
	// Unlimited says that only the age bounds the retries, not their number.
	Unlimited bool
	// Unavailable says that a server is down, so that the consumer should pause.
	Unavailable bool
}

// Classify reads an error's markers.
//
// The outermost marker of a chain decides. Errors joined by errors.Join, or by several %w,
// are judged one by one: any unavailable or postponed one rules the whole; else any
// recoverable one makes it recoverable, with the longest delay asked for; else it is
// unrecoverable only when all are; else the default policy holds. The class is the first
// one named among those that decided; inbox.ErrDraining anywhere gives the message back.
// An unmarked error has ClassDefault and the default policy; so has one whose own methods
// panic, and Err then says so. For nil the zero Failure is returned.
func Classify(err error) (f Failure) {
	if err == nil {
		return Failure{}
	}
	defer func() {
		if v := recover(); v != nil {
			f = unmarked(fmt.Errorf("inbox: the methods of an error of type %T panic: %v", err, v))
		}
	}()
	// A nil pointer that a handler returned as an error must not end the consumer, neither
	// here nor where Err is written to a log.
	_ = err.Error()
	f = unmarked(err)
	if errors.Is(err, inbox.ErrDraining) {
		f.Action, f.Counted = ActionReturn, false
		return f
	}
	v := base.Judge(err)
	f.After = v.After
	switch v.Kind {
	case base.Unavailable:
		f.Action, f.Counted, f.Unavailable = ActionReturn, false, true
	case base.Postponed:
		f.Counted, f.Unlimited = false, true
	case base.Recoverable:
		f.Unlimited = true
	case base.Unrecoverable:
		f.Action, f.Class = ActionDead, ClassUnrecoverable
	}
	if v.Class != "" {
		f.Class = v.Class
	}
	return f
}

func unmarked(err error) Failure {
	return Failure{Err: err, Class: ClassDefault, Action: ActionRetry, Counted: true}
}
