package driver

import (
	"context"
	"time"
)

// StatsLimit is where the counts of Depth stop: a count of StatsLimit means as many or more.
const StatsLimit = 100_000

// Hearing is an optional interface of a Source that hears of commits in all processes.
type Hearing interface {
	// Hears reports whether relays are woken for what is committed now, so that they need to look by
	// themselves only for messages without a wake-up.
	Hears() bool
}

// Waking is an optional interface of a Source that wakes relays.
type Waking interface {
	// Wake has a relay look for messages now: one of this process or, if none of them will, one of another.
	// It does not block.
	Wake()
}

// Measured is an optional interface of a Source that reports its backlog.
type Measured interface {
	// Depth looks at the store. Its cost is bounded, whatever the store holds.
	Depth(ctx context.Context) (Depth, error)
}

// Depth is how much lies in a store. No count goes above StatsLimit.
type Depth struct {
	// Ready messages are not published and do not wait for a time; those behind a parked one of their
	// key and those of a paused transport are among them.
	Ready int
	// Parked messages wait for their first or their next attempt.
	Parked int
	// Dead counts the dead letters.
	Dead int
	// OldestAge is for how long the oldest message has been stored that is ready, or waits after a
	// failure; 0: there is none. A store with very many waiting messages may look at those only
	// that are due first.
	OldestAge time.Duration
	// Stored counts the messages ever stored, those sent again included, or a few more: two looks tell how
	// many there are a second. 0: the store does not tell.
	Stored int64
	// Leased lanes are those that relays hold now, and Doubtful ones those whose last claim was lost, or has
	// messages under suspicion of it.
	Leased, Doubtful int
}

// Pausable is an optional interface of a Source that operators can pause.
type Pausable interface {
	// Pause keeps all relays, in all processes, from claiming anything until Resume. What they have in hand is
	// published and settled. By is who pauses, 1 to 128 bytes, and reason why, 1,000 at most; neither has control
	// characters. A pause that is there gets both, and keeps its begin.
	Pause(ctx context.Context, by, reason string) error
	// Resume ends the pause. It is no error that there is none.
	Resume(ctx context.Context) error
	// Paused returns the pause.
	Paused(ctx context.Context) (Pause, error)
}

// Pause says who has paused something, why and when. The zero value: it is not paused.
type Pause struct {
	By, Reason string
	Since      time.Time
}

// Identified is an optional interface of a Publisher that says what it sends to.
type Identified interface {
	// System returns the messaging.system of OpenTelemetry's semantic conventions, such as rabbitmq.
	System() string
}

// Windowed is an optional interface of a Publisher that reports how full its window is.
type Windowed interface {
	// Window returns how many messages await their confirm, and how many may at once.
	Window() (used, size int)
}
