package driver

import (
	"context"
	"time"
)

// Pausable is an optional interface of an inbox.Processor that operators can pause.
type Pausable interface {
	// Pause keeps all consumers on the processor, in all processes, from beginning another message until
	// Resume; they learn of it within a few seconds. What they have begun ends. By is who pauses, 1 to 128 bytes,
	// and reason why, 1,000 at most; neither has control characters. A pause that is there gets both, and keeps
	// its begin.
	Pause(ctx context.Context, by, reason string) error
	// Resume ends the pause. It is no error that there is none.
	Resume(ctx context.Context) error
	// Paused returns the pause.
	Paused(ctx context.Context) (Pause, error)
	// WatchPause tells the pause as soon as it can, and again when it has changed, until ctx ends. It tells the
	// zero Pause where it cannot know: what keeps it from that keeps the messages from being processed, too.
	WatchPause(ctx context.Context, tell func(Pause))
}

// Pause says who has paused something, why and when. The zero value: it is not paused.
type Pause struct {
	By, Reason string
	Since      time.Time
}
