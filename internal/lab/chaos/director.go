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
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// holdsBefore is how many holds are made before a fault.
	holdsBefore = 15
	// patience is how long a recovery is waited for, and then quiet.
	patience = 90 * time.Second
)

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
		var outcome Outcome
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
	d.watch, err = harness.NewWatch(ctx, harness.Subject{
		APIs: d.s.apis, DB: d.s.pool, Dial: harness.At(d.s.broker.URL()), Admin: d.s.broker.AdminURL,
		Hold: hold, Lost: d.s.losses, Seed: seed, Patience: patience,
	})
	if err != nil {
		return err
	}
	d.greedy = newGreedy(d.s.apis)
	d.greedy.start(ctx)
	return d.s.broker.WriteDefinitions(ctx)
}

// suffer lets one fault happen under load, measures the way back, and audits when all is quiet.
func (d *director) suffer(ctx context.Context, f fault) (o Outcome, j harness.Judged, err error) {
	o = Outcome{Kind: f.kind, Target: f.target, Lasts: f.lasts.Seconds()}
	complaints := d.s.complaints()
	lost := len(d.s.losses())
	d.watch.Crowd.Come(ctx)
	defer d.watch.Crowd.Leave()
	err = d.watch.UnderLoad(ctx, holdsBefore)
	o.endedBetween("before the fault", d.s.ended())
	if err != nil || len(o.Findings) > 0 { // the fault would be blamed, or hide it
		return o, j, err
	}
	d.watch.Crowd.ForgetSlowest()
	d.clockWentBack = d.clockWentBack || f.setsPostgresClock()
	broken, err := d.happen(ctx, f)
	o.find(audit.Stuck, broken...)
	if err != nil {
		return o, j, err
	}
	after := make(chan error, 1)
	go func() {
		if f.after == nil {
			after <- nil
			return
		}
		after <- f.after(ctx)
	}()
	var ended []string // processes that ended by themselves
	r, err := d.watch.Recover(ctx, func(context.Context) error {
		names, err := d.s.revive()
		ended = append(ended, names...)
		if err != nil {
			return err
		}
		return shop.AllReady(d.s.processes)
	})
	o.recovered(r, ended)
	if err := errors.Join(err, <-after); err != nil {
		return o, j, err
	}
	if len(r.Stuck) > 0 {
		o.Explanation = d.s.sessions(ctx)
	}
	d.watch.Crowd.Leave()
	j, err = d.watch.Audit(ctx, func(h *audit.History) {
		h.Limit, h.ClockWentBack = d.greedy.told(), d.clockWentBack
	})
	o.endedBetween("after the recovery", d.s.ended())
	o.Findings, o.Excused = append(o.Findings, j.Findings...), j.Excused
	o.Slowest = d.watch.Crowd.Slowest().Seconds()
	o.Complaints = d.s.complaints() - complaints
	o.Lost = len(d.s.losses()) - lost
	return o, j, err
}

// happen begins and ends a fault. What the shop did wrong is told apart from what the lab did.
func (d *director) happen(ctx context.Context, f fault) (broken []string, err error) {
	defer d.greedy.excuse(time.Now(), f.forgets)
	steps := []func(context.Context) error{f.begin, func(ctx context.Context) error { return runloop.Sleep(ctx, f.lasts) }}
	if f.end != nil {
		steps = append(steps, f.end)
	}
	for _, step := range steps {
		switch err := step(ctx); {
		case errors.Is(err, errPromise):
			broken = append(broken, err.Error())
		case err != nil:
			return broken, err
		}
	}
	return broken, nil
}

func (s *system) complaints() int {
	n := 0
	for _, p := range s.processes {
		n += p.Complaints()
	}
	return n
}
