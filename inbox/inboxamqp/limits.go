package inboxamqp

import (
	"log/slog"
	"runtime/metrics"
	"time"
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
			if memoryInUse() > cfg.MemoryLimit {
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

// memoryInUse is what the Go runtime holds and has not given back to the system.
func memoryInUse() uint64 {
	samples := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"},
	}
	metrics.Read(samples)
	return samples[0].Value.Uint64() - samples[1].Value.Uint64()
}
