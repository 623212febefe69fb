package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// Bounds ends a Drain.
type Bounds struct {
	// Limit is the most messages to publish or fail. 0 means 1000.
	Limit int
	// TimeLimit makes Drain wait for new messages, and for transports to come back, until it has
	// passed. 0 means that Drain ends as soon as nothing is ready.
	TimeLimit time.Duration
}

const defaultLimit = 1000

// Report is what a Drain did.
type Report struct {
	// Published counts messages that were confirmed.
	Published int
	// Failed counts attempts that failed, Dead those of them that were a message's last one.
	Failed, Dead int
}

// ExitCode is 0 when everything went and 1 when anything failed. A command should exit with 2
// where Drain returns an error.
func (r Report) ExitCode() int {
	if r.Failed > 0 {
		return 1
	}
	return 0
}

// Drain publishes what is ready until a bound is met or ctx is cancelled. It is the form for cron.
// The Report is valid also with an error: the store could not be reached, or a transport was
// unavailable to the end. Messages that wait for their next attempt are not waited for.
func (r *Relay) Drain(ctx context.Context, b Bounds) (Report, error) {
	if b.Limit < 0 || b.TimeLimit < 0 {
		return Report{}, fmt.Errorf("outbox: Bounds are negative: limit %d, time limit %v", b.Limit, b.TimeLimit)
	}
	setDefault(&b.Limit, defaultLimit)
	if b.TimeLimit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, b.TimeLimit)
		defer cancel()
	}
	var report Report
	for ctx.Err() == nil && report.Published+report.Failed < b.Limit {
		if d := r.allPaused(); d > 0 && b.TimeLimit > 0 {
			_ = runloop.Sleep(ctx, d)
			continue
		}
		round, err := r.round(ctx, min(r.cfg.BatchSize, b.Limit-report.Published-report.Failed))
		if err != nil {
			return report, fmt.Errorf("outbox: drain: %w", err)
		}
		report.Published += round.published
		report.Failed += round.failed
		report.Dead += round.dead
		if round.claimed > 0 {
			continue
		}
		if b.TimeLimit == 0 {
			break
		}
		r.idle(ctx, r.cfg.PollInterval)
	}
	return report, r.stillPaused()
}

// stillPaused is an error that names the transports which are unavailable.
func (r *Relay) stillPaused() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for name, p := range r.pauses {
		errs = append(errs, pausedError(name, p))
	}
	return errors.Join(errs...)
}
