package harness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// holdsBefore is how many holds are made before a fault.
	holdsBefore = 15
	// StartPatience is how long a process may take to listen, whatever the machine does besides.
	StartPatience = 2 * time.Minute
)

// ErrPromise marks an error of a fault's step that the shop is to blame for, such as a process that does not end when asked.
var ErrPromise = errors.New("a promise of the shop is broken")

// Fault is one thing that goes wrong and is put right again.
type Fault struct {
	Kind, Target string
	Begin        func(ctx context.Context) error
	// Lasts is the time between Begin and End.
	Lasts time.Duration
	// End is nil where the fault is over as soon as it has begun.
	End func(ctx context.Context) error
	// Over is called when the fault is over, with the time at which it began. Optional.
	Over func(since time.Time)
	// After restores what is no part of the recovery, such as a new standby. It runs beside the recovery. Optional.
	After func(ctx context.Context) error
}

// happen begins and ends the fault. The errors that the shop is to blame for are told apart from the lab's own.
func (f Fault) happen(ctx context.Context) (broken []string, err error) {
	if f.Over != nil {
		defer f.Over(time.Now())
	}
	steps := []func(context.Context) error{f.Begin, func(ctx context.Context) error { return runloop.Sleep(ctx, f.Lasts) }}
	if f.End != nil {
		steps = append(steps, f.End)
	}
	for _, step := range steps {
		switch err := step(ctx); {
		case errors.Is(err, ErrPromise):
			broken = append(broken, err.Error())
		case err != nil:
			return broken, err
		}
	}
	return broken, nil
}

// Outcome is the result of one fault. Times are in seconds.
type Outcome struct {
	Kind, Target string
	Lasts        float64
	// Held is how many seats clients got while the fault lasted.
	Held int64
	// Recovery is the time from the end of the fault until all was well, and Last the symptom that was last; After has all.
	Recovery float64
	Last     string
	After    map[string]float64
	// Slow says that the recovery is above the goal.
	Slow bool
	// Slowest is the longest time that an answer took.
	Slowest float64
	// Complaints is how many warnings and errors all processes have logged.
	Complaints int
	Findings   []audit.Finding
	// Lost is how many changes a failover to an asynchronous standby has lost; Excused counts the broken promises that all
	// losses so far explain.
	Lost    int
	Excused map[string]int
}

func (o *Outcome) find(kind string, details ...string) {
	for _, detail := range details {
		o.Findings = append(o.Findings, audit.Finding{Kind: kind, Detail: detail})
	}
}

func (o *Outcome) recovered(r Recovery, patience time.Duration) {
	total, last := r.Total()
	o.Recovery, o.Last, o.After, o.Slow = Seconds(total), last, map[string]float64{}, total > Goal
	for name, took := range r.After {
		o.After[name] = Seconds(took)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Stuck)) {
		o.find(audit.Stuck, fmt.Sprintf("%s after %v: %v", name, patience, r.Stuck[name]))
	}
}

// Seconds are rounded to tenths.
func Seconds(d time.Duration) float64 {
	return float64(d.Round(100*time.Millisecond)) / float64(time.Second)
}

// String is one line of a run, and one for each finding.
func (o Outcome) String() string {
	line := fmt.Sprintf("%-14s %-52s lasts %4.1f s, well again %4.1f s after it (%s), slowest answer %4.1f s, %d complaints",
		o.Kind, o.Target, o.Lasts, o.Recovery, o.Last, o.Slowest, o.Complaints)
	if o.Lost > 0 {
		line += fmt.Sprintf(", %d changes lost", o.Lost)
	}
	if o.Slow {
		line += ", ABOVE THE GOAL"
	}
	for _, f := range o.Findings {
		line += "\n    FOUND " + f.Kind + ": " + f.Detail
	}
	return line
}

// Suffer lets one fault happen under load, measures the way back, and audits when all is quiet. The error is the lab's own;
// findings are the shop's.
func (w *Watch) Suffer(ctx context.Context, f Fault) (o Outcome, j Judged, err error) {
	o = Outcome{Kind: f.Kind, Target: f.Target, Lasts: f.Lasts.Seconds()}
	complaints, lost := w.complaints(), len(w.lost())
	w.Crowd.Come(ctx)
	defer w.Crowd.Leave()
	err = w.underLoad(ctx)
	o.find(audit.Stuck, w.ended(" before the fault")...)
	if err != nil || len(o.Findings) > 0 { // the fault would be blamed, or hide it
		return o, j, err
	}
	w.Crowd.ForgetSlowest()
	held := w.Crowd.Holds()
	broken, err := f.happen(ctx)
	o.Held = w.Crowd.Holds() - held
	o.find(audit.Stuck, broken...)
	if err != nil {
		return o, j, err
	}
	after := make(chan error, 1)
	go func() {
		if f.After == nil {
			after <- nil
			return
		}
		after <- f.After(ctx)
	}()
	var ended []string
	r, err := w.recover(ctx, func(context.Context) error {
		names := w.ended("")
		ended = append(ended, names...)
		if err := w.revive(); err != nil {
			return err
		}
		return shop.AllReady(w.Processes)
	})
	o.recovered(r, w.Patience)
	o.find(audit.Stuck, ended...)
	if err := errors.Join(err, <-after); err != nil {
		return o, j, err
	}
	w.Crowd.Leave()
	j, err = w.audit(ctx)
	o.find(audit.Stuck, w.ended(" after the recovery")...)
	o.Findings, o.Excused = append(o.Findings, j.Findings...), j.Excused
	o.Slowest, o.Complaints, o.Lost = w.Crowd.Slowest().Seconds(), w.complaints()-complaints, len(w.lost())-lost
	return o, j, err
}

// underLoad returns when the clients have got something to lose.
func (w *Watch) underLoad(ctx context.Context) error {
	before := w.Crowd.Holds()
	return Poll(ctx, func(context.Context) error {
		if n := w.Crowd.Holds() - before; n < holdsBefore {
			return fmt.Errorf("%d of %d holds", n, holdsBefore)
		}
		return nil
	})
}

func (w *Watch) complaints() (n int) {
	for _, p := range w.Processes {
		n += p.Complaints()
	}
	return n
}

// EndedByItself is a finding about a process.
func EndedByItself(name string) string { return name + " ended by itself" }

// ended finds the processes that do not run.
func (w *Watch) ended(when string) (found []string) {
	for _, p := range w.Processes {
		if p.Ended() {
			found = append(found, EndedByItself(p.Name)+when)
		}
	}
	return found
}

// revive starts the processes again that have ended by themselves.
func (w *Watch) revive() error {
	for _, p := range w.Processes {
		if !p.Ended() {
			continue
		}
		if err := p.Start(w.Binary); err != nil {
			return err
		}
		if err := p.AwaitListening(StartPatience); err != nil && !errors.Is(err, shop.ErrEnded) {
			return err
		}
	}
	return nil
}
