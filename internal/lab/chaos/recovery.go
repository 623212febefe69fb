package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/chaos/audit"
	"github.com/holdfast-go/holdfast/internal/lab/crowd"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// recoveryGoal is how soon after the end of any fault all should be well again.
	recoveryGoal = 10 * time.Second
	// recoveryPatience is how long it is waited for. What is not well then is stuck.
	recoveryPatience = 90 * time.Second
)

// symptoms are what a recovery ends, in the order of tables.
var symptoms = []string{"ready", "answers", "outbox", "read model", "due holds"}

// recovery says when, after a fault's end, each symptom was seen for the last time.
type recovery struct {
	after map[string]time.Duration
	// stuck says why a symptom was still there when patience was over.
	stuck map[string]error
	// ended are processes that ended by themselves.
	ended []string
}

// total is when everything was well again, and what was last.
func (r recovery) total() (longest time.Duration, last string) {
	for _, name := range symptoms {
		if r.after[name] >= longest {
			longest, last = r.after[name], name
		}
	}
	return longest, last
}

// mark is a moment up to which everything must be caught up with.
type mark struct {
	change int64     // the newest of the history
	end    time.Time // by the database's clock, when the holds of that moment are due
}

// recover measures how long it takes from now on until no symptom is left. What must be published, taken and expired
// includes the holds by which the apis have shown that they answer: a part that has not yet noticed that its
// connection is dead has nothing else to do.
func (d *director) recover(ctx context.Context) (recovery, error) {
	r := recovery{after: map[string]time.Duration{}, stuck: map[string]error{}}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, recoveryPatience)
	defer cancel()
	var mu sync.Mutex
	await := func(symptom string, look func(context.Context) error) error {
		took, err := untilWell(ctx, began, look)
		mu.Lock()
		defer mu.Unlock()
		r.after[symptom] = took
		if err != nil {
			r.stuck[symptom] = err
		}
		return err
	}
	var all sync.WaitGroup
	all.Go(func() { _ = await("ready", d.ready(&r)) }) // what is stuck is in r
	if await("answers", d.crowd.AllAnswer()) != nil {
		all.Wait()
		return r, nil
	}
	m, err := d.mark(ctx)
	if err != nil {
		all.Wait() // until then the goroutine writes r
		return r, fmt.Errorf("postgres does not answer the lab: %w", err)
	}
	all.Go(func() { _ = await("outbox", d.none(outboxSQL, func() []any { return []any{m.change} })) })
	all.Go(func() {
		_ = await("read model", d.none(untakenSQL, func() []any {
			return []any{m.change, d.settled, append([]uuid.UUID{}, crowd.MessagesOf(d.s.losses())...)}
		}))
	})
	all.Go(func() {
		_ = runloop.Sleep(ctx, hold) // nothing is due before
		_ = await("due holds", d.none(dueSQL, func() []any { return []any{m.end} }))
		mu.Lock()
		defer mu.Unlock()
		r.after["due holds"] = max(0, r.after["due holds"]-hold)
	})
	all.Wait()
	return r, nil
}

func (d *director) mark(ctx context.Context) (m mark, err error) {
	err = poll(ctx, func() error {
		return d.s.pool.QueryRow(ctx, "select (select last_value from chaos_history_id_seq), clock_timestamp() + $1", hold).Scan(&m.change, &m.end)
	})
	return m, err
}

// untilWell asks until the answer is nil, and returns when it was asked that time.
func untilWell(ctx context.Context, began time.Time, look func(context.Context) error) (time.Duration, error) {
	for {
		asked := time.Now()
		err := look(ctx)
		if err == nil {
			return asked.Sub(began), nil
		}
		if runloop.Sleep(ctx, 100*time.Millisecond) != nil {
			return time.Since(began), err
		}
	}
}

// poll calls f until it returns nil, and returns its last error when ctx ends.
func poll(ctx context.Context, f func() error) error {
	_, err := untilWell(ctx, time.Now(), func(context.Context) error { return f() })
	return err
}

const outboxSQL = `select count(*) from holdfast_outbox o join chaos_history h on h.message = o.id where h.what = 'message' and h.id <= $1`

const untakenSQL = `select count(*) from chaos_history m where m.id <= $1 and m.id > $2 and m.what = 'message' and m.message <> all ($3)
	and not exists (select from chaos_history t where t.message = m.message and t.what = 'taken')`

const dueSQL = `select count(*) from reservations where status = 'held' and expires_at <= $1`

// none wants a count of 0.
func (d *director) none(sql string, args func() []any) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		var n int
		if err := d.s.pool.QueryRow(ctx, sql, args()...).Scan(&n); err != nil {
			return err
		}
		if n > 0 {
			return fmt.Errorf("%d left", n)
		}
		return nil
	}
}

// ready wants every process to be so, and starts those again that have ended by themselves.
func (d *director) ready(r *recovery) func(context.Context) error {
	return func(context.Context) error {
		ended, err := d.s.revive()
		r.ended = append(r.ended, ended...)
		if err != nil {
			return err
		}
		return d.s.allReady()
	}
}

// readyClient gives a process as long for an answer as a load balancer would.
var readyClient = &http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

func (s *system) allReady() error {
	errs := make([]error, len(s.processes))
	var all sync.WaitGroup
	for i, p := range s.processes {
		all.Go(func() { errs[i] = p.Ready(readyClient) })
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// sessions tells what those of the database do.
func (s *system) sessions(ctx context.Context) string {
	rows, _ := s.pool.Query(ctx, `select format('%s %s, blocked by %s, since %s: %s', pid, state,
		pg_blocking_pids(pid), state_change, left(query, 200)) from pg_stat_activity where state <> 'idle' order by state_change`)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err.Error()
	}
	return strings.Join(lines, "\n")
}

// holdsLeft counts reservations that are held, due or not.
func (s *system) holdsLeft(ctx context.Context) (n int, err error) {
	return n, s.pool.QueryRow(ctx, "select count(*) from reservations where status = $1", audit.Held).Scan(&n)
}
