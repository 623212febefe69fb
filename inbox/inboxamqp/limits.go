package inboxamqp

import (
	"log/slog"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// memoryInterval is how often the memory is measured.
const memoryInterval = time.Second

// watchLimits stops the run by time or memory.
func (r *run) watchLimits() {
	cfg := r.c.cfg
	var timeUp, measure <-chan time.Time
	if cfg.TimeLimit > 0 {
		timer := time.NewTimer(cfg.TimeLimit)
		defer timer.Stop()
		timeUp = timer.C
	}
	if cfg.MemoryLimit > 0 {
		ticker := time.NewTicker(memoryInterval)
		defer ticker.Stop()
		measure = ticker.C
	}
	for {
		select {
		case <-r.stop.Done():
			return
		case <-timeUp:
			r.reached("TimeLimit")
			return
		case <-measure:
			if runloop.MemoryInUse() > cfg.MemoryLimit {
				r.reached("MemoryLimit")
				return
			}
		}
	}
}

// reached ends the run in good order.
func (r *run) reached(limit string) {
	r.c.cfg.Logger.Info("limit reached, draining", slog.String("limit", limit))
	r.halt()
}
