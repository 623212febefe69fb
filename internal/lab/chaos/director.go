package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
)

// patience is how long a recovery is waited for, and then quiet.
const patience = 90 * time.Second

// director runs one seed: it lets faults happen to a system under load, and audits after each.
type director struct {
	s      *system
	watch  *harness.Watch
	greedy *greedy
	log    io.Writer
	// clockWentBack is set by the first fault of Postgres' clock: each ends, or begins, by going back.
	clockWentBack bool
}

// options are those of a run.
type options struct {
	kinds    []kind
	whole    bool // the kinds are all there are
	binary   string
	previous string // "" for none
	out      string // for logs, "" for nowhere
	log      io.Writer
	deadline time.Time // no fault begins later; zero for none
}

// play runs one seed. The error is the lab's own; what the shop does wrong is in the report.
func play(ctx context.Context, seed uint64, o options) (report SeedReport, err error) {
	began := time.Now()
	clocks := slices.ContainsFunc(o.kinds, func(k kind) bool { return k.name == "clock" }) && noClocks() == ""
	s, err := openSystem(ctx, o.binary, clocks)
	defer func() { err = errors.Join(err, s.close()) }()
	if err != nil {
		return report, err
	}
	d := &director{s: s, log: o.log}
	if err := d.open(ctx, seed); err != nil {
		return report, err
	}
	defer d.watch.Close()
	defer func() { d.greedy.stop() }()
	var last harness.Judged
	dealer := &dealer{s: s, rng: rand.New(rand.NewPCG(seed, 1)), previous: o.previous}
	report.Seed = seed
	for _, f := range dealer.dealAll(o.kinds) {
		if !o.deadline.IsZero() && time.Now().After(o.deadline) {
			report.Cut = true
			break
		}
		var outcome harness.Outcome
		outcome, last, err = d.suffer(ctx, f)
		report.Outcomes = append(report.Outcomes, outcome)
		fmt.Fprintln(o.log, outcome)
		if err != nil {
			err = fmt.Errorf("%s, %s: %w", f.kind, f.target, err)
		}
		if err != nil || len(outcome.Findings) > 0 {
			if o.out != "" {
				err = errors.Join(err, s.logs(o.out))
			}
			break // the next fault would be blamed
		}
	}
	if o.whole && err == nil {
		report.whole(last.History.Limit)
	}
	report.count(last, time.Since(began))
	return report, err
}

// open starts the watch, and the user who asks for too much.
func (d *director) open(ctx context.Context, seed uint64) (err error) {
	subject := harness.Subject{
		Binary: d.s.binary, APIs: d.s.apis, DB: d.s.pool, Dial: harness.At(d.s.broker.URL()), Admin: d.s.broker.AdminURL,
		Hold: hold, Lost: d.s.losses, Seed: seed, Patience: patience,
		Amend: func(h *audit.History) { h.Limit, h.ClockWentBack = d.greedy.told(), d.clockWentBack },
	}
	for _, p := range d.s.processes {
		subject.Processes = append(subject.Processes, p.Process)
	}
	if d.watch, err = harness.NewWatch(ctx, subject); err != nil {
		return err
	}
	d.greedy = newGreedy(d.s.apis)
	d.greedy.start(ctx)
	return d.s.broker.WriteDefinitions(ctx)
}

func (d *director) suffer(ctx context.Context, f fault) (harness.Outcome, harness.Judged, error) {
	d.clockWentBack = d.clockWentBack || f.setsPostgresClock()
	o, j, err := d.watch.Suffer(ctx, harness.Fault{
		Kind: f.kind, Target: f.target, Begin: f.begin, Lasts: f.lasts, End: f.end, After: f.after,
		Over: func(since time.Time) { d.greedy.excuse(since, f.forgets) },
	})
	if len(o.Findings) > 0 {
		fmt.Fprintln(d.log, d.s.sessions(ctx))
	}
	return o, j, err
}
