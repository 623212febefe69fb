package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// hold is how long the shop holds a seat.
	hold = 2 * time.Second
	// giveUp is how long a recovery may take. One that takes longer than the goal is marked in the report.
	giveUp = 3 * time.Minute
)

// trial is the shop on the clusters, with customers.
type trial struct {
	house     *house
	processes shop.Roles
	apis      []string
	db        *pgxpool.Pool
	watch     *harness.Watch
	// poolers starts those again that have ended by themselves.
	poolers *supervisor
}

// recovery is the way back from one fault.
type recovery struct {
	harness.Recovery
	fault string
	held  int64 // seats that customers held while the fault lasted
	err   error
}

// openTrial starts an api, a relay, a consumer and a sweeper on each app host.
func openTrial(ctx context.Context, h *house) (*trial, error) {
	t := &trial{house: h}
	var names []string
	for _, host := range h.apps {
		names = append(names, host.Name)
	}
	t.poolers = supervise(ctx, names, h.poolers)
	binary, err := shop.Binary()
	if err != nil {
		return t, err
	}
	for app, host := range h.apps {
		for i, role := range []string{"api", "relay", "consumer", "sweeper"} {
			address := fmt.Sprintf("%s:%d", host.Address, 8080+i)
			p := shop.New(role+" on "+host.Name, h.env(app), "-backend=services", "-role="+role, "-addr="+address,
				"-user-limit=1000000000", "-global-limit=1000000000", "-hold="+hold.String())
			p.On = host.Start
			if err := p.Start(binary); err != nil {
				return t, err
			}
			t.processes = append(t.processes, p)
			if role == "api" {
				t.apis = append(t.apis, "http://"+address)
			}
		}
	}
	if err := harness.Poll(ctx, t.ready); err != nil {
		return t, err
	}
	cfg, err := pgxpool.ParseConfig(h.database())
	if err != nil {
		return t, err
	}
	cfg.ConnConfig.ConnectTimeout = 5 * time.Second
	if t.db, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return t, err
	}
	t.watch, err = harness.NewWatch(ctx, harness.Subject{
		APIs: func() []string { return t.apis }, DB: t.db, Dial: h.dial, Admin: h.rabbit[0].AdminURL,
		Queue: amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum, amqp.SingleActiveConsumerArg: true},
		Hold:  hold, Seed: rand.Uint64(), Patience: giveUp,
	})
	if err == nil {
		t.watch.Crowd.Come(ctx)
	}
	return t, err
}

func (t *trial) ready(context.Context) error { return shop.AllReady(t.processes) }

// close ends the processes. They say why if one does not end as it should.
func (t *trial) close() error {
	if t.watch != nil {
		t.watch.Close()
	}
	if t.db != nil {
		t.db.Close()
	}
	err := t.processes.Stop()
	t.poolers.stop()
	return err
}

// suffer lets a fault happen under load and measures the way back.
func (t *trial) suffer(ctx context.Context, m mishap) recovery {
	fmt.Fprintln(os.Stderr, "clusters:", m.name)
	t.poolers.now(m.name)
	if r := t.recover(ctx, "before "+m.name); r.err != nil {
		return r
	}
	err := t.watch.UnderLoad(ctx, 20)
	before := t.watch.Crowd.Holds()
	if err == nil {
		err = m.begin(ctx)
	}
	if err == nil {
		err = runloop.Sleep(ctx, m.lasts)
	}
	during := t.watch.Crowd.Holds() - before
	if err == nil && m.end != nil {
		err = m.end(ctx)
	}
	if err != nil {
		return recovery{fault: m.name, err: err}
	}
	r := t.recover(ctx, m.name)
	r.held = during
	if r.err != nil {
		t.tell(os.Stderr)
	}
	if m.mend != nil {
		r.err = errors.Join(r.err, harness.Poll(ctx, m.mend))
	}
	total, _ := r.Total()
	fmt.Fprintf(os.Stderr, "clusters: %s: well after %.1f s: %v\n", m.name, total.Seconds(), r.err)
	return r
}

// tell shows the ends of the logs.
func (t *trial) tell(to io.Writer) {
	for _, p := range t.processes {
		log := p.Log()
		fmt.Fprintf(to, "the log of %s ends in\n%s\n", p.Name, log[max(0, len(log)-8000):])
	}
}

func (t *trial) recover(ctx context.Context, name string) (r recovery) {
	r.fault = name
	r.Recovery, r.err = t.watch.Recover(ctx, t.ready)
	for symptom, err := range r.Stuck {
		r.err = errors.Join(r.err, fmt.Errorf("%s: %s after %v: %w", name, symptom, giveUp, err))
	}
	return r
}

// verdict is the result of the whole trial.
type verdict struct {
	recoveries []recovery
	requests   int64
	held       int64
	broker     harness.Verdict
	crashes    []crash // of PgBouncer
	faults     []string
}

// run has each chosen fault happen once, and judges.
func (t *trial) run(ctx context.Context, chosen *regexp.Regexp) (v verdict, err error) {
	for _, m := range t.mishaps() {
		if !chosen.MatchString(m.name) {
			continue
		}
		r := t.suffer(ctx, m)
		v.recoveries = append(v.recoveries, r)
		if r.err != nil {
			v.faults = append(v.faults, r.err.Error())
		}
		if ctx.Err() != nil {
			return v, ctx.Err()
		}
	}
	t.watch.Crowd.Leave()
	v.crashes = t.poolers.all()
	v.requests, v.held = t.watch.Crowd.Requests(), t.watch.Crowd.Holds()
	j, err := t.watch.Audit(ctx, nil)
	if err != nil {
		return v, err
	}
	if len(j.History.Reservations) == 0 {
		return v, errors.New("no customer held a seat")
	}
	v.broker = j.Broker
	for _, f := range j.Findings {
		v.faults = append(v.faults, f.Kind+": "+f.Detail)
	}
	return v, nil
}
