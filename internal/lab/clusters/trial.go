package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/crowd"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// goal is how soon all should be well again after a fault's end. What takes longer is said; what takes giveUp fails.
const (
	goal   = 10 * time.Second
	giveUp = 3 * time.Minute
)

// trial is the shop on the clusters, with customers and a stream of ordered messages.
type trial struct {
	house  *house
	roles  []*role
	apis   []string
	crowd  *crowd.Crowd
	stream *stream
	// poolers starts those again that have ended by themselves.
	poolers *supervisor
}

// recovery says when, after a fault's end, each symptom was seen for the last time.
type recovery struct {
	fault string
	after map[string]time.Duration
	held  int64 // seats that customers held while the fault lasted
	err   error
}

// symptoms are what a recovery ends, in the order of the table.
var symptoms = []string{"ready", "answers", "outbox", "read model", "due holds", "stream"}

func (r recovery) total() (longest time.Duration) {
	for _, d := range r.after {
		longest = max(longest, d)
	}
	return longest
}

// openTrial starts an api, a relay, a consumer and a sweeper on each app host.
func openTrial(ctx context.Context, h *house) (*trial, error) {
	t := &trial{house: h}
	var names []string
	for _, host := range h.apps {
		names = append(names, host.Name)
	}
	t.poolers = supervise(ctx, names, h.poolers)
	for app, host := range h.apps {
		for i, name := range []string{"api", "relay", "consumer", "sweeper"} {
			r, err := startRole(host, 8080+i, h.env(app), name, "-hold=2s")
			if err != nil {
				return t, err
			}
			t.roles = append(t.roles, r)
			if name == "api" {
				t.apis = append(t.apis, r.url)
			}
		}
	}
	err := eventually(ctx, func(ctx context.Context) error { return allReady(ctx, t.roles) })
	if err != nil {
		return t, err
	}
	if t.stream, err = openStream(ctx, h); err != nil {
		return t, err
	}
	if err := onPostgres(ctx, h.database(), crowd.HistorySQL); err != nil {
		return t, err
	}
	if t.crowd, err = crowd.New(ctx, func() []string { return t.apis }, rand.Uint64()); err != nil {
		return t, err
	}
	t.crowd.Come(ctx)
	return t, nil
}

// close ends the processes, and tells what they said if one does not end as it should.
func (t *trial) close() error {
	if t.crowd != nil {
		t.crowd.Leave()
		t.crowd.Close()
	}
	if t.stream != nil {
		t.stream.stopAll()
	}
	err := stopAll(t.roles)
	t.poolers.stop()
	return err
}

// suffer lets a fault happen under load and measures the way back.
func (t *trial) suffer(ctx context.Context, m mishap) recovery {
	fmt.Fprintln(os.Stderr, "clusters:", m.name)
	t.poolers.now(m.name)
	if r := t.recover(ctx, "what was before "+m.name); r.err != nil {
		return r
	}
	from := t.crowd.Holds()
	err := eventually(ctx, func(context.Context) error {
		if n := t.crowd.Holds() - from; n < 20 {
			return fmt.Errorf("%d of 20 holds", n)
		}
		return nil
	})
	if err != nil {
		return recovery{fault: m.name, err: err}
	}
	before := t.crowd.Holds()
	if err := m.begin(ctx); err != nil {
		return recovery{fault: m.name, err: err}
	}
	_ = runloop.Sleep(ctx, m.lasts)
	during := t.crowd.Holds() - before
	if m.end != nil {
		if err := m.end(ctx); err != nil {
			return recovery{fault: m.name, err: err}
		}
	}
	r := t.recover(ctx, m.name)
	r.held = during
	if r.err != nil {
		t.tell()
	}
	if m.mend != nil {
		r.err = errors.Join(r.err, eventually(ctx, m.mend))
	}
	fmt.Fprintf(os.Stderr, "clusters: %s: well after %.1f s: %v\n", m.name, r.total().Seconds(), r.err)
	return r
}

// tell shows the ends of the logs.
func (t *trial) tell() {
	for _, r := range t.roles {
		fmt.Fprintf(os.Stderr, "%s said:\n%s\n", r.name, &r.log)
	}
}

// recover measures how long it takes from now on until no symptom is left.
func (t *trial) recover(ctx context.Context, name string) recovery {
	ctx, cancel := context.WithTimeout(ctx, giveUp)
	defer cancel()
	r := recovery{fault: name, after: map[string]time.Duration{}}
	began := time.Now()
	var end time.Time
	if _, r.err = untilWell(ctx, began, func(ctx context.Context) error {
		return t.ask(ctx, "select clock_timestamp()", &end)
	}); r.err != nil {
		return r
	}
	var mu sync.Mutex
	var all sync.WaitGroup
	for symptom, look := range t.looks(end) {
		all.Go(func() {
			took, err := untilWell(ctx, began, look)
			mu.Lock()
			defer mu.Unlock()
			r.after[symptom] = took
			if err != nil {
				r.err = errors.Join(r.err, fmt.Errorf("%s: %s after %v: %w", name, symptom, giveUp, err))
			}
		})
	}
	all.Wait()
	return r
}

// untilWell asks until the answer is nil.
func untilWell(ctx context.Context, began time.Time, look func(context.Context) error) (time.Duration, error) {
	for {
		asked := time.Now()
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := look(attempt)
		cancel()
		if err == nil {
			return asked.Sub(began), nil
		}
		if runloop.Sleep(ctx, 100*time.Millisecond) != nil {
			return time.Since(began), err
		}
	}
}

// ask asks the primary, whichever that is.
func (t *trial) ask(ctx context.Context, sql string, answer any, args ...any) error {
	conn, err := pgx.Connect(ctx, t.house.database())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return conn.QueryRow(ctx, sql, args...).Scan(answer)
}

// looks are the questions after the symptoms of a fault that ended at end, by the database's clock.
func (t *trial) looks(end time.Time) map[string]func(context.Context) error {
	none := func(sql string) func(context.Context) error {
		return func(ctx context.Context) error {
			var n int
			if err := t.ask(ctx, sql, &n, end); err != nil {
				return err
			}
			if n > 0 {
				return fmt.Errorf("%d left", n)
			}
			return nil
		}
	}
	var deeds []ledger.Deed
	return map[string]func(context.Context) error{
		"ready":     func(ctx context.Context) error { return allReady(ctx, t.roles) },
		"answers":   t.crowd.AllAnswer(),
		"outbox":    none("select count(*) from holdfast_outbox where created_at <= $1"),
		"due holds": none("select count(*) from reservations where status = 'held' and expires_at <= $1"),
		// Every reservation up to the end of the fault has been heard of, and of those that were due by then that they ended. The
		// audit compares each with its last change.
		"read model": none(`select count(*) from reservations r left join reservation_states s on s.reservation_id = r.id
			where r.created_at <= $1 and (s.status is null or r.expires_at <= $1 and s.status = 'held')`),
		"stream": func(ctx context.Context) (err error) {
			if deeds == nil {
				if deeds, err = ledger.Deeds(ctx, t.stream.pool); err != nil {
					return err
				}
			}
			if n := len(t.stream.ledger.Missing(deeds)); n > 0 {
				return fmt.Errorf("%d messages have not arrived", n)
			}
			return nil
		},
	}
}

// verdict is what the whole trial came to.
type verdict struct {
	recoveries []recovery
	requests   int64
	held       int64
	stream     ledger.Verdict
	crashes    []crash // of PgBouncer
	faults     []string
}

// run has everything happen once that is chosen, and judges.
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
	t.crowd.Leave()
	t.stream.stopWriters()
	v.crashes = t.poolers.all()
	v.requests, v.held = t.crowd.Requests(), t.crowd.Holds()
	found, err := t.audit(ctx)
	if err != nil {
		return v, err
	}
	if v.stream, err = t.stream.audit(ctx); err != nil {
		return v, err
	}
	v.faults = append(append(v.faults, found...), v.stream.Faults...)
	return v, nil
}
