package driver

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/internal/actor"
)

// StatsLimit is where the counts of Depth stop: a count of StatsLimit means as many or more.
const StatsLimit = 100_000

// Background is an optional interface of a Source with work of its own beside a relay: hearing of
// commits in other processes, pruning.
type Background interface {
	// Background works until ctx ends. Relay.Run calls it once, and waits for its end within
	// RelayConfig.ShutdownTimeout. A fault is logged and tried again, and ends nothing. Several relays
	// may run on one Source at once.
	//
	// wake makes the relay look for messages now. It never blocks. False means that this relay does
	// not look: it is ending, or its store or its default transport is paused. The Source may then
	// wake another relay. The relay may have looked before Background hears of commits. Background
	// therefore calls wake when it begins to hear of those of this process, and wakes a relay whenever it
	// begins to hear of those of other processes, after an outage too.
	Background(ctx context.Context, wake func() bool)
}

// Service is an optional interface of a Publisher that keeps a connection.
type Service interface {
	// Run keeps the connection until ctx ends, waits for the confirms still open and returns.
	// Relay.Run calls it before the first message, ends it after its last confirm, and waits for its
	// end within RelayConfig.ShutdownTimeout. Several relays may call it at once: the connection lives
	// while any Run does. A fault is logged and tried again, and ends nothing.
	Run(ctx context.Context) error
	// Ready returns nil while the Publisher can send.
	Ready(ctx context.Context) error
}

// Checked is an optional interface of a Source or a Publisher that can look at its server.
type Checked interface {
	// Check returns nil if there is nothing to mend. Else the error joins the findings, each of which
	// has a method Mend() string, and the failures to look.
	Check(ctx context.Context) error
}

// Pruner is an optional interface of a Source whose store grows.
type Pruner interface {
	// PrunePass deletes what is due in small steps, unless the Source is set not to prune by itself.
	// Relay.Drain ends with it. It ends when nothing is due any more, when another process prunes, or
	// when ctx ends. A fault is logged.
	PrunePass(ctx context.Context)
}

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
type Pause = actor.Pause

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
