package driver

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/internal/actor"
)

// StatsLimit is the largest count in a Depth. It means StatsLimit or more.
const StatsLimit = 100_000

// Background is an optional interface of a Source with background work, such as listening for
// commits in other processes, or pruning.
type Background interface {
	// Background works until ctx ends. Relay.Run calls it once, and waits for its return within
	// RelayConfig.ShutdownTimeout. It logs and retries faults, and does not return because of one.
	// Several relays may run on one Source at once.
	//
	// wake makes the relay poll now. It never blocks. It returns false if this relay does not poll,
	// because it is shutting down, or because its store or its default transport is paused. The Source
	// may then wake another relay. The relay may have polled before Background started to listen.
	// Background therefore calls wake when it starts to listen for commits in this process. It wakes a relay
	// each time it starts to listen for commits in other processes, also after an outage.
	Background(ctx context.Context, wake func() bool)
}

// Service is an optional interface of a Publisher that keeps a connection.
type Service interface {
	// Run keeps the connection until ctx ends, waits for the confirms still open and returns.
	// Relay.Run calls it before the first message, cancels it after the last confirm, and waits for its
	// return within RelayConfig.ShutdownTimeout. Several relays may call it at once: the connection
	// stays open while any Run runs. It logs and retries faults, and does not return because of one.
	Run(ctx context.Context) error
	// Ready returns nil while the Publisher can send. Otherwise the error is the reason.
	Ready(ctx context.Context) error
}

// Checked is an optional interface of a Source or a Publisher that can check its server.
type Checked interface {
	// Check returns nil if the server meets all requirements. Otherwise the error joins the findings,
	// each with a method Fix() string that returns the fix, and the errors of checks that failed to run.
	Check(ctx context.Context) error
}

// Pruner is an optional interface of a Source that can delete old rows.
type Pruner interface {
	// PrunePass deletes due rows in small steps, unless automatic pruning is off. Relay.Drain calls it
	// last. It returns when no more rows are due, when another process prunes, or when ctx ends. It
	// logs faults.
	PrunePass(ctx context.Context)
}

// Hearing is an optional interface of a Source that receives notifications of commits in all processes.
type Hearing interface {
	// Hears reports whether relays are woken for every commit at present. If so, they need polls only
	// for messages that cause no wake-up.
	Hears() bool
}

// Waking is an optional interface of a Source that can wake relays.
type Waking interface {
	// Wake makes a relay poll now. It prefers a relay of this process, and tries other processes if none of
	// those polls. It does not block.
	Wake()
}

// Named is an optional interface of a Source whose outbox has a name.
type Named interface {
	// Name returns the name of the outbox. It is the attribute outbox of the relay's metrics, and empty without Named.
	Name() string
}

// Measured is an optional interface of a Source that reports its backlog.
type Measured interface {
	// Depth reads the backlog. Its cost is limited however many messages the store has.
	Depth(ctx context.Context) (Depth, error)
}

// Depth is the backlog of a store. No count exceeds StatsLimit.
type Depth struct {
	// Ready counts the messages that are not published and do not wait for a time. It includes
	// messages behind a parked message of their key, and messages of a paused transport.
	Ready int
	// Parked counts the messages that wait for their first or next attempt.
	Parked int
	// Dead counts the dead letters.
	Dead int
	// OldestAge is the age of the oldest message that is ready or waits after a failure; 0 means
	// there is none. A store with very many waiting messages may consider only the messages that are
	// due first.
	OldestAge time.Duration
	// Stored counts the messages ever stored, including replayed ones. It may be slightly too high. The
	// difference of two readings gives the rate. 0 means that the store does not report it.
	Stored int64
	// Leased counts the lanes that relays hold now. Doubtful counts the lanes whose last claim was lost
	// and the lanes with suspect messages of such a claim.
	Leased, Doubtful int
}

// Counts are the numbers of attempts of one process since it created its relay.
type Counts struct {
	// Done are published messages. Failed attempts became retries or dead letters; Retried is the number of the retries.
	Done, Failed, Retried int64
}

// Pausable is an optional interface of a Source that operators can pause.
type Pausable interface {
	// Pause stops all relays, in all processes, from claiming messages until Resume. Messages in flight are
	// still published and settled. By is the operator's name, 1 to 128 bytes. Reason is at most 1,000
	// bytes. Neither may have control characters. Pausing again replaces both and keeps the start time.
	Pause(ctx context.Context, by, reason string) error
	// Resume ends the pause. It returns nil also if there is none.
	Resume(ctx context.Context) error
	// Paused returns the current pause, or the zero Pause.
	Paused(ctx context.Context) (Pause, error)
}

// Pause records who paused something, why and when. The zero value means not paused.
type Pause = actor.Pause

// Identified is an optional interface of a Publisher that names its messaging system.
type Identified interface {
	// System returns the messaging.system of OpenTelemetry's semantic conventions, such as rabbitmq.
	System() string
}

// Windowed is an optional interface of a Publisher that reports the use of its window.
type Windowed interface {
	// Window returns the number of unconfirmed messages, and the largest number allowed.
	Window() (used, size int)
}
