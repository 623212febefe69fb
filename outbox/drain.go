package outbox

import (
	"cmp"
	"context"
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
	// MemoryLimit ends Drain after the batches in hand when the Go runtime holds more bytes than this:
	// its total without what it has given back to the system. At least one batch is taken. 0 means no
	// limit.
	MemoryLimit uint64
}

const defaultLimit = 1000

// Report is what a Drain did.
type Report struct {
	// Published counts messages that were confirmed.
	Published int
	// Failed counts attempts that failed, Dead those of them that were a message's last one.
	Failed, Dead int
	// Ended says why the Drain ended: "empty" (nothing was ready any more), "limit", "time limit" or
	// "memory limit" (that bound was reached, and there may be more to publish). It is empty if Drain
	// returns an error or if ctx ended.
	Ended string
}

const (
	endedEmpty  = "empty"
	endedLimit  = "limit"
	endedTime   = "time limit"
	endedMemory = "memory limit"
)

// ExitCode is 0 when everything went and 1 when anything failed. A command should exit with 2
// where Drain returns an error.
func (r Report) ExitCode() int {
	if r.Failed > 0 {
		return 1
	}
	return 0
}

// Drain publishes what is ready until a bound is reached or ctx ends. Unless ctx has ended, it then
// has the store delete what is due, for ShutdownTimeout at most, if the store prunes by itself. Drain
// is the form for cron; it keeps the publishers' connections while it works.
// The Report is valid also with an error: the store could not be reached or could not record an outcome, or a transport
// was unavailable to the end. A claim that fails is tried once more. It may hold messages all the same:
// Drain then ends as empty only after LeaseTTL. Messages that wait for their next attempt are not
// waited for, unless it is due within 200 ms.
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
	if err := cmp.Or(err, d.err, r.rounds.health.err()); err != nil { // the last is that of outcomes that the store refused
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

// portionDelay is more than a store leaves between two portions of messages that it brings back, and
// maxQuiet how many looks in a row may find none all the same.
const (
	portionDelay = 200 * time.Millisecond
	maxQuiet     = 20
)

// drain claims until a bound is met.
func (d *dispatcher) drain(ctx context.Context, b Bounds) (string, error) {
	quiet := 0 // looks in a row with nothing in hand
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
