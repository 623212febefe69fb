package main

import (
	"context"
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

// openTrial starts an api, a relay, a consumer and a sweeper on each app host.
func openTrial(ctx context.Context, h *house, binary string) (*trial, error) {
	t := &trial{house: h}
	var names []string
	for _, host := range h.apps {
		names = append(names, host.Name)
	}
	t.poolers = supervise(ctx, names, h.poolers)
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
		Processes: t.processes, Binary: binary, APIs: func() []string { return t.apis }, DB: t.db, Dial: h.dial, Admin: h.rabbit[0].AdminURL,
		Queue: amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum, amqp.SingleActiveConsumerArg: true},
		Hold:  hold, Seed: rand.Uint64(), Patience: giveUp,
	})
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

// tell shows the ends of the logs.
func (t *trial) tell(to io.Writer) {
	for _, p := range t.processes {
		log := p.Log()
		fmt.Fprintf(to, "the log of %s ends in\n%s\n", p.Name, log[max(0, len(log)-8000):])
	}
}

// verdict is the result of the whole trial.
type verdict struct {
	outcomes []harness.Outcome
	requests int64
	held     int64
	broker   harness.Verdict
	crashes  []crash // of PgBouncer
	faults   []string
}

// run has each chosen fault happen once, until one breaks a promise.
func (t *trial) run(ctx context.Context, chosen *regexp.Regexp) (v verdict, err error) {
	for _, f := range t.faults() {
		if !chosen.MatchString(f.Kind + ": " + f.Target) {
			continue
		}
		t.poolers.now(f.Target)
		o, j, err := t.watch.Suffer(ctx, f)
		fmt.Fprintln(os.Stderr, o)
		if err != nil {
			return v, fmt.Errorf("%s: %s: %w", f.Kind, f.Target, err)
		}
		v.outcomes, v.broker = append(v.outcomes, o), j.Broker
		for _, f := range o.Findings {
			v.faults = append(v.faults, fmt.Sprintf("%s: %s: %s", o.Target, f.Kind, f.Detail))
		}
		if len(v.faults) > 0 {
			t.tell(os.Stderr)
			break // the next fault would be blamed
		}
	}
	v.crashes = t.poolers.all()
	v.requests, v.held = t.watch.Crowd.Requests(), t.watch.Crowd.Holds()
	return v, nil
}
