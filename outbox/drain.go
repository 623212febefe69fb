package outbox

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// Bounds limits a Drain.
type Bounds struct {
	// Limit is the maximum number of messages to publish or fail. 0 means 1000.
	Limit int
	// TimeLimit makes Drain wait for new messages and for paused transports for this time. 0 means that
	// Drain ends as soon as no message is ready.
	TimeLimit time.Duration
	// MemoryLimit ends Drain after the batches in flight when the Go runtime holds more bytes than this:
	// its total without the memory returned to the system. Drain claims at least one batch. 0 means no
	// limit.
	MemoryLimit uint64
}

const defaultLimit = 1000

// Report is the result of a Drain.
type Report struct {
	// Published counts the confirmed messages.
	Published int
	// Failed counts the failed attempts. Dead counts those after which the message became a dead letter.
	Failed, Dead int
	// Ended is the reason why Drain ended: "empty" (no message was ready), or "limit", "time limit" or
	// "memory limit" (that bound was reached, and messages may be left). It is empty if Drain returned
	// an error or if ctx ended.
	Ended string
}

const (
	endedEmpty  = "empty"
	endedLimit  = "limit"
	endedTime   = "time limit"
	endedMemory = "memory limit"
)

// ExitCode returns 0 if no attempt failed, else 1. If Drain returns an error, a command should exit with 2.
func (r Report) ExitCode() int {
	if r.Failed > 0 {
		return 1
	}
	return 0
}

// Drain publishes ready messages until a bound is reached or ctx ends. Use it in cron jobs. Unless ctx has
// ended, it then prunes due rows of the store for at most ShutdownTimeout, if automatic pruning is on.
// Drain keeps the publishers' connections while it works.
//
// Drain returns an error if the store could not be reached or could not record an outcome, or if a
// transport was unavailable until the end. The Report is valid with an error too. Drain retries a failed
// claim once. That claim may hold messages, so Drain then ends as empty only after LeaseTTL. Drain waits
// for a message's next attempt only if it is due within 200 ms.
func (r *Relay) Drain(ctx context.Context, b Bounds) (Report, error) {
	if b.Limit < 0 || b.TimeLimit < 0 {
		return Report{}, fmt.Errorf("outbox: Bounds are negative: limit %d, time limit %v", b.Limit, b.TimeLimit)
	}
	b.Limit = cmp.Or(b.Limit, defaultLimit)
	parent := ctx
	if b.TimeLimit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, b.TimeLimit)
		defer cancel()
	}
	defer r.transports.watch(r.wake.ring)()
	d, wait, end := r.dispatch(ctx, b.Limit)
	defer end()
	defer r.runPublishers(d.spans)()
	defer wait()
	ended, err := d.drain(ctx, b)
	wait()
	prune(parent, r.source, r.cfg.ShutdownTimeout)
	if err := cmp.Or(err, d.err, d.refused); err != nil {
		return d.report, fmt.Errorf("outbox: drain: %w", err)
	}
	if err := r.transports.paused(); err != nil {
		return d.report, err
	}
	if parent.Err() == nil {
		d.report.Ended = ended
	}
	return d.report, nil
}

// portionDelay is longer than the time between two portions of a store that returns parked messages in portions.
// maxQuiet is the maximum number of polls in a row that find nothing while such portions are due.
const (
	portionDelay = 200 * time.Millisecond
	maxQuiet     = 20
)

// drain claims until a bound is reached.
func (d *dispatcher) drain(ctx context.Context, b Bounds) (string, error) {
	quiet := 0 // polls in a row with nothing in flight
	for ctx.Err() == nil {
		found, err := d.next(ctx)
		if err != nil {
			return "", err
		}
		if d.size() == 0 && d.running == 0 {
			return endedLimit, nil
		}
		begun := d.running > 0 || d.report != (Report{})
		if begun && b.MemoryLimit > 0 && runloop.MemoryInUse() > b.MemoryLimit {
			return endedMemory, nil
		}
		if found {
			continue
		}
		quiet++
		if d.running > 0 {
			quiet = 0
		}
		soon := d.due > 0 && d.due <= portionDelay && quiet <= maxQuiet
		if d.running == 0 && b.TimeLimit == 0 && !soon && !time.Now().Before(d.lost) {
			return endedEmpty, nil
		}
		d.idle(ctx)
	}
	return endedTime, nil
}
