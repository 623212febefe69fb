package driver

import "context"

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
