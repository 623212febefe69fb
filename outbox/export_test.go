package outbox

import (
	"log/slog"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
)

// SetPauses sets the pause after a failure to base, and to at most longest after several failures.
func (r *Relay) SetPauses(base, longest time.Duration) {
	r.pauses = backoff.Policy{Base: base, Max: longest, Jitter: 0.5}
}

// Logger returns the relay's logger.
func (r *Relay) Logger() *slog.Logger { return r.cfg.Logger }

// Wake makes an idle relay poll now.
func (r *Relay) Wake() { r.wake.ring() }
