package driver

import (
	"context"
	"errors"
)

// Publisher sends messages to one broker. The package outbox/outboxtest/conformance
// has the suite that an implementation must pass.
type Publisher interface {
	// Publish sends m and returns; it reports the outcome later through done, so that many
	// messages can be in flight at once. The rules:
	//
	//   - done is called exactly once for every call of Publish, from any goroutine, before or
	//     after Publish returns. It does not block and does not call back into the Publisher.
	//   - done(nil) means that the broker has taken responsibility for m. Anything else is an
	//     error, best a *PublishError; an error of another type counts as Retryable.
	//   - Publish may block while the Publisher's window is full or its connection is being made,
	//     but no longer than ctx lives. ctx ends when nobody waits for m any more: what is not
	//     confirmed then is reported as Unavailable, soon.
	//   - ctx bounds this one message. A connection that Publish opens must not die with it.
	//   - m.Body and the maps of m are read only, and read no more once done was called.
	//   - Several goroutines may call Publish at once. A relay publishes a message of an ordering
	//     key only after the message before it is confirmed, so a Publisher need not keep any order.
	Publish(ctx context.Context, m Message, done func(error))
}

// Reconnecting is an optional interface of a Publisher that has a connection of its own.
type Reconnecting interface {
	// OnReady has f called each time the Publisher can send again after it could not, until stop is
	// called. f returns at once and calls nothing of the Publisher's.
	OnReady(f func()) (stop func())
}

// Class says what a failure to publish means for the message and its relay.
type Class string

// The classes of failure.
const (
	// Retryable is a failure of this message that may pass: it costs an attempt.
	Retryable Class = "retryable"
	// Permanent is a failure that will be the same next time, such as a message the broker refuses
	// as too large. By default the message becomes a dead letter at once.
	Permanent Class = "permanent"
	// Unroutable means that the broker is well but has no queue or exchange for this message:
	// it costs an attempt.
	Unroutable Class = "unroutable"
	// Unavailable means that the broker was not reached, or did not confirm in time: it costs no
	// message an attempt, and the relay leaves the transport alone for a while.
	Unavailable Class = "unavailable"
	// Blocked means that the broker is there but takes nothing at present (a resource alarm).
	// The relay treats it as it treats Unavailable.
	Blocked Class = "blocked"
	// Quarantined is the relay's own, not for a Publisher: the message is a dead letter without a
	// further attempt, since it was lost alone with MaxCrashes relays in a row.
	Quarantined Class = "quarantined"
)

// PublishError is a failure to publish together with its class.
type PublishError struct {
	Class Class
	// Err says what happened. Its text is stored with the message, so it must not quote credentials
	// or bodies.
	Err error
}

// Error implements error.
func (e *PublishError) Error() string {
	if e.Err == nil {
		return "outbox: publish: " + string(e.Class)
	}
	return "outbox: publish: " + string(e.Class) + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *PublishError) Unwrap() error { return e.Err }

// ClassOf returns the class of a failure to publish: the one of the first
// *PublishError in err, else Retryable.
func ClassOf(err error) Class {
	var pe *PublishError
	if !errors.As(err, &pe) {
		return Retryable
	}
	switch pe.Class {
	case Permanent, Unroutable, Unavailable, Blocked, Quarantined:
		return pe.Class
	default:
		return Retryable
	}
}
