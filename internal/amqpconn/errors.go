package amqpconn

import (
	"errors"
	"fmt"
)

// The ways in which publishing fails. Each error of Publisher matches exactly one.
var (
	// ErrInvalid means the message cannot be put on the wire, now or later.
	ErrInvalid = errors.New("not a valid message")
	// ErrUnroutable means no queue is bound for the message, or its exchange does not exist,
	// or this user may not publish there.
	ErrUnroutable = errors.New("no queue takes it")
	// ErrNacked means the broker did not take responsibility for the message, without a reason that
	// says whether it ever will.
	ErrNacked = errors.New("nacked")
	// ErrBlocked means the broker takes no messages for now: a resource alarm.
	ErrBlocked = errors.New("blocked by the broker")
	// ErrUnavailable means there is no connection, or it ended before the confirm:
	// the broker may or may not have the message.
	ErrUnavailable = errors.New("broker unavailable")
)

func unavailable(cause error) error {
	if cause == nil {
		return ErrUnavailable
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, cause)
}

func blocked(reason string) error { return fmt.Errorf("%w: %s", ErrBlocked, reason) }
