package inbox

import "context"

// Processor does the work of messages. *Mux is one without deduplication; inboxpgx and
// inboxredis have those with it. Package inboxtest/conformance holds what they promise.
type Processor interface {
	// Process returns one result per message, in the same order. Nil means that the
	// message's effect is durable, or that it was a duplicate of one whose effect is:
	// acknowledge it. Any other result is read by driver.Classify. It may be called from many
	// goroutines at once. Messages whose turn had not come when ctx ended get an error
	// that is ErrDraining.
	Process(ctx context.Context, msgs []*Message) []error
}

// Waiter blocks until the caller may go on: a rate limiter bound to a key, for example.
// It returns an error when ctx ends first, or when it cannot tell.
type Waiter interface {
	Wait(ctx context.Context) error
}
