package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"
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
	b.Limit = cmp.Or(b.Limit, defaultLimit)
	if b.TimeLimit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, b.TimeLimit)
		defer cancel()
	}
	d, wait := r.dispatch(ctx, b.Limit)
	defer wait()
	for ctx.Err() == nil {
		found, err := d.next(ctx)
		if err != nil {
			wait()
			return d.report, fmt.Errorf("outbox: drain: %w", err)
		}
		if found {
			continue
		}
		if d.size() == 0 || d.rounds == 0 && b.TimeLimit == 0 {
			break
		}
		d.idle(ctx)
	}
	wait()
	if d.err != nil {
		return d.report, fmt.Errorf("outbox: drain: %w", d.err)
	}
	return d.report, r.stillPaused()
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
