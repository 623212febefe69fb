package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Stats is the state of a relay.
type Stats struct {
	// Store is nil where the Source is not Measured.
	Store *driver.Depth
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
	source, ok := r.source.(driver.Measured)
	if !ok {
		return stats, nil
	}
	store, err := source.Depth(ctx)
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
		if w, ok := p.(driver.Windowed); ok {
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
