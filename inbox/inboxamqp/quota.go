package inboxamqp

import (
	"context"
	"log/slog"
	"math"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// memoryInterval is how often the memory is measured.
const memoryInterval = time.Second

// quota ends a run in good order at one of its limits. Only the session counts, and sessions
// come one after the other.
type quota struct {
	cfg    *settings
	halt   func()
	handed int // messages given to workers
}

// left is how many messages MessageLimit allows.
func (q *quota) left() int {
	if limit := q.cfg.MessageLimit; limit > 0 {
		return limit - q.handed
	}
	return math.MaxInt
}

// count counts what was handed over towards MessageLimit. A message that only passes through
// on its way to a later retry does not count.
func (q *quota) count(ds []*delivery) {
	for _, d := range ds {
		if d.wait == 0 {
			q.handed++
		}
	}
	if q.left() <= 0 {
		q.reached("MessageLimit")
	}
}

// watch ends the run by time or memory.
func (q *quota) watch(stop context.Context) {
	var timeUp, measure <-chan time.Time
	if q.cfg.TimeLimit > 0 {
		timer := time.NewTimer(q.cfg.TimeLimit)
		defer timer.Stop()
		timeUp = timer.C
	}
	if q.cfg.MemoryLimit > 0 {
		ticker := time.NewTicker(memoryInterval)
		defer ticker.Stop()
		measure = ticker.C
	}
	for {
		select {
		case <-stop.Done():
			return
		case <-timeUp:
			q.reached("TimeLimit")
			return
		case <-measure:
			if runloop.MemoryInUse() > q.cfg.MemoryLimit {
				q.reached("MemoryLimit")
				return
			}
		}
	}
}

func (q *quota) reached(limit string) {
	q.cfg.Logger.Info("limit reached, draining", slog.String("limit", limit))
	q.halt()
}
