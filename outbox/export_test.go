package outbox

import (
	"log/slog"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
)

// SetPauses has what is unavailable left alone for base, and for longest after several failures.
func (r *Relay) SetPauses(base, longest time.Duration) {
	r.pauses = backoff.Policy{Base: base, Max: longest, Jitter: 0.5}
}

// Logger returns the relay's logger.
func (r *Relay) Logger() *slog.Logger { return r.cfg.Logger }

// Wake makes an idle relay look for messages at once.
func (r *Relay) Wake() { r.wake.ring() }
