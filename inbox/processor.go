package inbox

import (
	"context"
	"errors"

	"github.com/holdfast-go/holdfast/internal/check"
)

// Finding is one thing that an adapter's Check found missing or mis-set on its server.
type Finding = check.Finding

// Processor does the work of messages. *Mux is one without deduplication; inboxpgx and
// inboxredis have those with it. Package inboxtest/conformance holds what they promise.
type Processor interface {
	// Process returns one result per message, in the same order. Nil means that the
	// message's effect is durable, or that it was a duplicate of one whose effect is:
	// acknowledge it. Any other result is for Classify. It may be called from many
	// goroutines at once. Messages whose turn had not come when ctx ended get an error
	// that is ErrDraining.
	Process(ctx context.Context, msgs []*Message) []error
}

// Waiter blocks until there is leave to go on: a rate limiter bound to a key, for example.
// It returns an error when ctx ends first, or when it cannot tell.
type Waiter interface {
	Wait(ctx context.Context) error
}

// ErrDraining is the cause (context.Cause) with which a consumer cancels the context of
// handlers that are still at work when its shutdown budget is spent. What such a handler
// returns is nobody's fault: the message is given back uncounted.
var ErrDraining = errors.New("inbox: consumer is draining")

// ErrUnavailable is inside every error of Unavailable: a server that processing needs is
// down. Returned itself it means the same.
var ErrUnavailable = Unavailable(errors.New("inbox: unavailable"))
