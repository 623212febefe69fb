package inbox

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// The classes this package gives. Handlers add their own by Classed.
const (
	ClassDefault       = "default"       // failed too often
	ClassValidation    = "validation"    // undecodable, unknown name, no valid id
	ClassUnrecoverable = "unrecoverable" // the handler said so
	ClassQuarantined   = "quarantined"   // ends the process again and again; not run any more
)

const maxClassBytes = 64

// ValidClass reports whether a text can be a class: 1 to 64 of a-z, 0-9, dot, hyphen, underscore.
func ValidClass(class string) bool {
	if class == "" || len(class) > maxClassBytes {
		return false
	}
	return strings.IndexFunc(class, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '.' && r != '-' && r != '_'
	}) < 0
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

// Failure is what Classify reads out of an error. RetryPolicy.Next turns it into a Decision.
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
// one named among those that decided; ErrDraining anywhere gives the message back.
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
	if errors.Is(err, ErrDraining) {
		f.Action, f.Counted = ActionReturn, false
		return f
	}
	v := judge(err)
	f.After = v.after
	switch v.kind {
	case kindUnavailable:
		f.Action, f.Counted, f.Unavailable = ActionReturn, false, true
	case kindPostponed:
		f.Counted, f.Unlimited = false, true
	case kindRecoverable:
		f.Unlimited = true
	case kindUnrecoverable:
		f.Action, f.Class = ActionDead, ClassUnrecoverable
	}
	if v.class != "" {
		f.Class = v.class
	}
	return f
}

func unmarked(err error) Failure {
	return Failure{Err: err, Class: ClassDefault, Action: ActionRetry, Counted: true}
}

// verdict is what the markers of an error, or of a part of it, add up to.
type verdict struct {
	kind  kind
	class string
	after time.Duration
}

func judge(err error) verdict {
	switch e := err.(type) {
	case *markedError:
		inner := judge(e.err)
		return e.over(inner)
	case interface{ Unwrap() []error }:
		return judgeAll(e.Unwrap())
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			return judge(inner)
		}
	}
	return verdict{}
}

// over lays the marker over the verdict of the error inside it.
func (e *markedError) over(inner verdict) verdict {
	v := inner
	if e.kind != kindNone {
		v.kind, v.after = e.kind, e.after
	}
	if e.class != "" {
		v.class = e.class
	}
	return v
}

func judgeAll(errs []error) verdict {
	var verdicts []verdict
	decides := kindNone
	for _, err := range errs {
		if err == nil {
			continue
		}
		v := judge(err)
		verdicts = append(verdicts, v)
		if v.kind > kindUnrecoverable {
			decides = max(decides, v.kind)
		}
	}
	if decides == kindNone && allUnrecoverable(verdicts) {
		decides = kindUnrecoverable
	}
	joined := verdict{kind: decides}
	for _, v := range verdicts {
		if v.kind != decides {
			continue
		}
		joined.after = max(joined.after, v.after)
		if joined.class == "" {
			joined.class = v.class
		}
	}
	return joined
}

func allUnrecoverable(verdicts []verdict) bool {
	for _, v := range verdicts {
		if v.kind != kindUnrecoverable {
			return false
		}
	}
	return len(verdicts) > 0
}
