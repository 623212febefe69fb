package driver

import (
	"context"
	"errors"
)

// Publisher sends messages to one broker. Package outbox/outboxtest/conformance has the test suite
// that an implementation must pass.
type Publisher interface {
	// Publish sends m and returns; it reports the outcome later through done, so that many
	// messages can be in flight at once. The rules:
	//
	//   - Publish calls done exactly once per call, from any goroutine, before or after Publish
	//     returns. done does not block and does not call the Publisher.
	//   - done(nil) means that the broker has taken responsibility for m. Any other argument is a
	//     failure, best a *PublishError; an error of another type counts as Retryable.
	//   - Publish may block while the Publisher's window is full or its connection is being
	//     opened, but not after ctx ends. ctx ends when nobody waits for m any more. If m is not
	//     confirmed by then, Publish soon reports Unavailable.
	//   - ctx applies to this one message. A connection that Publish opens must outlive ctx.
	//   - m.Body and the maps of m are read-only. Publish does not read them after calling done.
	//   - Publish must be safe for concurrent use. A relay publishes a message of an ordering
	//     key only after the key's previous message is confirmed. A Publisher need not keep any order.
	Publish(ctx context.Context, m Message, done func(error))
}

// Reconnecting is an optional interface of a Publisher that keeps its own connection.
type Reconnecting interface {
	// OnReady registers f. The Publisher calls f each time it can send again after it could not,
	// until stop is called. f returns immediately and does not call the Publisher.
	OnReady(f func()) (stop func())
}

// Class is the kind of a publish failure. It decides how the relay treats the message and the transport.
type Class string

// The classes of publish failures.
const (
	// Retryable is a failure of this message that may pass. It costs an attempt.
	Retryable Class = "retryable"
	// Permanent is a failure that will repeat, such as a message that is too large for the broker.
	// The message becomes a dead letter immediately.
	Permanent Class = "permanent"
	// Unroutable means that the broker works but has no queue or exchange for this message. It
	// costs an attempt.
	Unroutable Class = "unroutable"
	// Unavailable means that the broker could not be reached, or did not confirm in time. It costs no
	// message an attempt, and the relay pauses the transport.
	Unavailable Class = "unavailable"
	// Blocked means that the broker can be reached but accepts nothing at present (a resource
	// alarm). The relay treats it like Unavailable.
	Blocked Class = "blocked"
	// Quarantined is set by the relay; Publishers do not use it. The message becomes a dead letter
	// without a further attempt, because MaxCrashes relays in a row were lost with it alone.
	Quarantined Class = "quarantined"
)

// PublishError is a publish failure with its class.
type PublishError struct {
	Class Class
	// Err is the cause. Its text is stored with the message, so it must not contain credentials
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

// ClassOf returns the class of the first *PublishError in err, or Retryable if there is none or its
// class is unknown.
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
