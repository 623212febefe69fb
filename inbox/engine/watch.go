package engine

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// memoryInterval is how often the memory is measured.
const memoryInterval = time.Second

// watch returns when ctx ends, or a limit of time or memory is reached, which it tells of.
func watch(ctx context.Context, cfg *settings, post func(event)) {
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
		case <-ctx.Done():
			return
		case <-timeUp:
			post(event{kind: halted, limit: "TimeLimit"})
			return
		case <-measure:
			if runloop.MemoryInUse() > cfg.MemoryLimit {
				post(event{kind: halted, limit: "MemoryLimit"})
				return
			}
		}
	}
}
