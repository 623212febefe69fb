package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/lab/chaos/audit"
	"github.com/holdfast-go/holdfast/internal/lab/crowd"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	// observed is the queue that gets every message of the shop.
	observed = "chaos"
	exchange = "reservation"
	// holdsBefore is how many holds are made before a fault.
	holdsBefore = 15
	// quietPatience is how long it takes at most until nothing is under way any more.
	quietPatience = 90 * time.Second
)

// director runs one seed: it lets faults happen to a system under load, and audits after each.
type director struct {
	s      *system
	crowd  *crowd.Crowd
	greedy *greedy
	ledger *ledger.Ledger // of what reached the broker
	log    io.Writer
	// settled is the newest change of the history when all was quiet for the last time.
	settled int64
	stop    func() // of the observer
	// clockWentBack is set by the first fault of Postgres' clock: each ends, or begins, by going back.
	clockWentBack bool
}

// options are those of a run.
type options struct {
	kinds    []kind
	whole    bool // the kinds are all there are
	short    bool
	binary   string
	previous string // "" for none
	out      string // for logs, "" for nowhere
	log      io.Writer
	deadline time.Time // no fault begins later; zero for none
}

// play runs one seed. The error is the lab's own; what the shop does wrong is in the report.
func play(ctx context.Context, seed uint64, o options) (report SeedReport, h audit.History, err error) {
	began := time.Now()
	clocks := slices.ContainsFunc(o.kinds, func(k kind) bool { return k.name == "clock" }) && noClocks() == ""
	s, err := openSystem(ctx, o.binary, clocks)
	defer func() { err = errors.Join(err, s.close()) }()
	if err != nil {
		return report, h, err
	}
	d := &director{s: s, ledger: ledger.New(), log: o.log}
	if err := d.open(ctx, seed); err != nil {
		return report, h, err
	}
	defer func() {
		d.greedy.stop()
		d.stop()
		d.crowd.Close()
	}()
	dealer := &dealer{s: s, rng: rand.New(rand.NewPCG(seed, 1)), short: o.short, previous: o.previous}
	report.Seed = seed
	for _, f := range dealer.dealAll(o.kinds) {
		if !o.deadline.IsZero() && time.Now().After(o.deadline) {
			report.Cut = true
			break
		}
		var outcome Outcome
		outcome, h, err = d.suffer(ctx, f)
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
		report.whole(h.Limit)
	}
	report.count(h, d.ledger.Audit(crowd.Deeds(h.Changes)), time.Since(began))
	return report, h, err
}

// open lets the history and the observer begin, and opens the events.
func (d *director) open(ctx context.Context, seed uint64) error {
	if _, err := d.s.pool.Exec(ctx, crowd.HistorySQL); err != nil {
		return err
	}
	err := ledger.OnBroker(ctx, d.s.broker.URL(), func(ch *amqp.Channel) error {
		if _, err := ch.QueueDeclare(observed, true, false, false, false, nil); err != nil {
			return err
		}
		return ch.QueueBind(observed, "#", exchange, false, nil)
	})
	if err == nil {
		err = d.s.broker.WriteDefinitions(ctx)
	}
	if err == nil {
		d.crowd, err = crowd.New(ctx, d.s.apis, seed)
	}
	if err != nil {
		return err
	}
	d.observe(ctx)
	d.greedy = newGreedy(d.s.apis)
	d.greedy.start(ctx)
	return nil
}

// observe notes what reaches the broker, until stop.
func (d *director) observe(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	observer := &ledger.Consumer{Dial: ledger.At(d.s.broker.URL()), Queue: observed, Prefetch: 100, Ledger: d.ledger}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = observer.Run(ctx) // it returns nil
	}()
	d.stop = func() {
		cancel()
		<-ended
	}
}

// suffer lets one fault happen under load, measures the way back, and audits when all is quiet.
func (d *director) suffer(ctx context.Context, f fault) (Outcome, audit.History, error) {
	o := Outcome{Kind: f.kind, Target: f.target, Lasts: f.lasts.Seconds()}
	before := d.crowd.Holds()
	complaints := d.s.complaints()
	lost := len(d.s.losses())
	d.crowd.Come(ctx)
	defer d.crowd.Leave()
	err := d.underLoad(ctx, before)
	o.endedBetween("before the fault", d.s.ended())
	if err != nil {
		return o, audit.History{}, err
	}
	if len(o.Findings) > 0 { // the fault would be blamed, or hide it
		d.crowd.Leave()
		h, err := d.history(ctx)
		return o, h, err
	}
	d.crowd.ForgetSlowest()
	d.clockWentBack = d.clockWentBack || f.setsPostgresClock()
	broken, err := d.happen(ctx, f)
	o.find(audit.Stuck, broken...)
	if err != nil {
		return o, audit.History{}, err
	}
	after := make(chan error, 1)
	go func() {
		if f.after == nil {
			after <- nil
			return
		}
		after <- f.after(ctx)
	}()
	r, err := d.recover(ctx)
	o.recovered(r)
	if err := errors.Join(err, <-after); err != nil {
		return o, audit.History{}, err
	}
	if len(r.stuck) > 0 {
		o.Explanation = d.s.sessions(ctx)
	}
	d.crowd.Leave()
	h, err := d.audit(ctx, &o)
	o.Slowest = d.crowd.Slowest().Seconds()
	o.Complaints = d.s.complaints() - complaints
	o.Lost = len(d.s.losses()) - lost
	return o, h, err
}

// underLoad returns when the clients have got something to lose.
func (d *director) underLoad(ctx context.Context, before int64) error {
	ctx, cancel := context.WithTimeout(ctx, testenv.Patience)
	defer cancel()
	return poll(ctx, func() error {
		if n := d.crowd.Holds() - before; n < holdsBefore {
			return fmt.Errorf("%d of %d holds", n, holdsBefore)
		}
		return nil
	})
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

// audit waits until nothing is under way, and looks at everything that has happened since the seed began.
func (d *director) audit(ctx context.Context, o *Outcome) (audit.History, error) {
	if err := d.quiet(ctx); err != nil {
		o.find(audit.Stuck, "not quiet: "+err.Error())
	}
	h, err := d.history(ctx)
	if err != nil {
		return h, err
	}
	o.endedBetween("after the recovery", d.s.ended())
	_, unmet := d.crowd.Told()
	o.find(audit.Refused, unmet...)
	checked := audit.Check(h)
	o.Findings = append(o.Findings, checked.Findings...)
	o.Excused = checked.Excused
	d.ledger.Excuse(crowd.MessagesOf(h.Lost)...)
	for _, fault := range d.ledger.Audit(crowd.Deeds(h.Changes)).Faults {
		o.find("at the broker", fault)
	}
	if n := len(h.Changes); n > 0 {
		d.settled = h.Changes[n-1].ID
	}
	return h, nil
}

// quiet returns when nobody holds a seat and every message has been taken.
func (d *director) quiet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, quietPatience)
	defer cancel()
	return poll(ctx, func() error {
		if n, err := d.s.holdsLeft(ctx); err != nil || n > 0 {
			return errors.Join(err, fmt.Errorf("%d holds", n))
		}
		h, err := d.history(ctx)
		if err != nil {
			return err
		}
		d.ledger.Excuse(crowd.MessagesOf(h.Lost)...)
		if n := len(d.ledger.Missing(crowd.Deeds(h.Changes))); n > 0 {
			return fmt.Errorf("%d messages have not reached the broker", n)
		}
		if n := h.Left.Outbox; n > 0 {
			return fmt.Errorf("%d messages are left in the outbox", n)
		}
		if n := h.Untaken(); n > 0 {
			return fmt.Errorf("%d messages have taken no effect", n)
		}
		return nil
	})
}

// history reads everything there is to know.
func (d *director) history(ctx context.Context) (audit.History, error) {
	h, err := crowd.History(ctx, d.s.pool)
	if err != nil {
		return h, err
	}
	h.Answers, _ = d.crowd.Told()
	h.Limit = d.greedy.told()
	h.Lost, h.ClockWentBack = d.s.losses(), d.clockWentBack
	h.Left.DeadInbox, err = crowd.DeadLetters(ctx, d.s.broker.AdminURL())
	return h, err
}
