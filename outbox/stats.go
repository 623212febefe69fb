package outbox

import (
	"context"
	"fmt"
	"time"
)

// StatsLimit is where the counts of StoreStats stop: a count of StatsLimit means as many or more.
const StatsLimit = 100_000

// Measured is what a Source may be besides: it tells how much lies in its store.
type Measured interface {
	// Stats looks at the store. Its cost is bounded, whatever the store holds.
	Stats(ctx context.Context) (StoreStats, error)
}

// StoreStats is how much lies in a store. No count goes above StatsLimit.
type StoreStats struct {
	// Ready messages are not published and do not wait for a time; those behind a parked one of their
	// key and those of a paused transport are among them.
	Ready int64
	// Parked messages wait for their first or their next attempt.
	Parked int64
	// Dead counts the dead letters.
	Dead int64
	// OldestAge is for how long the oldest message has been stored that is ready, or waits after a
	// failure; 0: there is none. A store with very many waiting messages may look at those only
	// that are due first.
	OldestAge time.Duration
}

// Windowed is what a Publisher may be besides: it tells how full its window is.
type Windowed interface {
	// Window returns how many messages await their confirm, and how many may at once.
	Window() (used, size int)
}

// Stats is the state of a relay.
type Stats struct {
	// Store is nil where the Source is not Measured.
	Store *StoreStats
	// Transports are by name.
	Transports map[string]TransportStats
}

// TransportStats is the state of one transport, as this relay sees it.
type TransportStats struct {
	State TransportState
	// Failures counts the batches in a row that found the transport unavailable or blocked, and Err
	// is what the last one met; nil: it works.
	Failures int
	Err      error
	// Window is how full the publisher's window is, from 0 to 1; 0 where it is not Windowed.
	Window float64
}

// TransportState is the state of the circuit breaker before a transport.
type TransportState string

// The states of a transport.
const (
	// TransportClosed: messages flow.
	TransportClosed TransportState = "closed"
	// TransportPaused: it was found unavailable or blocked and is left alone.
	TransportPaused TransportState = "paused"
	// TransportProbing: its pause is over, and one batch finds out whether it works.
	TransportProbing TransportState = "probing"
)

// Stats asks the source and the publishers, within StoreTimeout. With an error the Transports are
// valid all the same.
func (r *Relay) Stats(ctx context.Context) (Stats, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.StoreTimeout)
	defer cancel()
	stats := Stats{Transports: r.transportStats()}
	source, ok := r.source.(Measured)
	if !ok {
		return stats, nil
	}
	store, err := source.Stats(ctx)
	if err != nil {
		return stats, fmt.Errorf("outbox: stats: %w", err)
	}
	stats.Store = &store
	return stats, nil
}

func (r *Relay) transportStats() map[string]TransportStats {
	all := make(map[string]TransportStats, len(r.transports))
	for name, p := range r.transports {
		s := r.breaker(name)
		if w, ok := p.(Windowed); ok {
			if used, size := w.Window(); size > 0 {
				s.Window = float64(used) / float64(size)
			}
		}
		all[name] = s
	}
	return all
}

// breaker is the state of a transport without its window.
func (r *Relay) breaker(name string) TransportStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, ok := r.pauses[name]
	switch {
	case !ok:
		return TransportStats{State: TransportClosed}
	case time.Now().Before(p.until):
		return TransportStats{State: TransportPaused, Failures: p.failures, Err: p.err}
	default:
		return TransportStats{State: TransportProbing, Failures: p.failures, Err: p.err}
	}
}
