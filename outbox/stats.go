package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Stats is the state of a relay and of its store. No count goes above 100,000: that number means as
// many or more. The counts and the age are 0 where the store does not report them.
type Stats struct {
	// Ready counts the messages that are not published and do not wait for a time. Those behind a
	// parked message of their key and those of a paused transport are among them.
	Ready int
	// Parked counts the messages that wait for their first or their next attempt.
	Parked int
	// Dead counts the dead letters.
	Dead int
	// OldestAge is for how long the oldest message has been stored that is ready, or waits after a
	// failure. 0: there is none.
	OldestAge time.Duration
	// Transports are by name.
	Transports map[string]TransportStats
}

// TransportStats is the state of one transport, as this relay sees it.
type TransportStats struct {
	// State is "closed" (messages flow), "paused" (the transport was found unavailable or blocked and
	// is left alone) or "probing" (its pause is over, and one batch finds out whether it works).
	State string
	// Failures counts the batches in a row that found the transport unavailable or blocked, and Err
	// is what the last one met; nil: it works.
	Failures int
	Err      error
	// Window is how full the publisher's window is, from 0 to 1; 0 where it is not Windowed.
	Window float64
}

const (
	stateClosed  = "closed"
	statePaused  = "paused"
	stateProbing = "probing"
)

// Stats asks the source and the publishers, within 5 s. With an error the Transports are
// valid all the same.
func (r *Relay) Stats(ctx context.Context) (Stats, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.storeTimeout())
	defer cancel()
	stats := Stats{Transports: r.transports.stats()}
	source, ok := r.source.(driver.Measured)
	if !ok {
		return stats, nil
	}
	store, err := source.Depth(ctx)
	if err != nil {
		return stats, fmt.Errorf("outbox: stats: %w", err)
	}
	stats.Ready, stats.Parked, stats.Dead, stats.OldestAge = store.Ready, store.Parked, store.Dead, store.OldestAge
	return stats, nil
}
