package faults_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// The goal is that everything is back recoveryGoal after the end of any fault. A busy machine may
// take recoverySlack as long: what waits for a timer or a deadline that is too long takes longer.
const (
	recoveryGoal     = 10 * time.Second
	recoverySlack    = 3
	recoveryPatience = time.Minute
)

// mishap is one thing that goes wrong and is put right again.
type mishap struct {
	name  string
	begin func(t *testing.T)
	// lasts is the time between begin and end.
	lasts time.Duration
	// end is nil where the fault is over as soon as it has begun.
	end func(t *testing.T)
	// longOnly leaves it out of the short form.
	longOnly bool
}

// symptoms are what a recovery ends, in the order of the table. Each returns nil once it is gone.
var symptoms = []string{"ready", "answers", "outbox", "read model", "due holds"}

// recovery says when, after a fault's end, each symptom was seen for the last time.
type recovery struct {
	fault   string
	after   map[string]time.Duration
	slowest time.Duration // answer
	lines   int           // logged from the beginning of the fault on
}

// total is when everything was well again, and what was last.
func (r recovery) total() (time.Duration, string) {
	var longest time.Duration
	last := symptoms[0]
	for _, name := range symptoms {
		if r.after[name] > longest {
			longest, last = r.after[name], name
		}
	}
	return longest, last
}

// suffer lets a fault happen under load and measures the way back.
func (s *reservationShop) suffer(t *testing.T, f mishap) recovery {
	t.Helper()
	s.recover(t, "what was before")
	from := s.crowd.held.Load()
	s.eventually(t, func() error {
		if n := s.crowd.held.Load() - from; n < 20 {
			return fmt.Errorf("%d of 20 holds", n)
		}
		return nil
	})
	lines := s.logLines()
	s.crowd.slowest.Store(0)
	f.begin(t)
	pause(t.Context(), f.lasts)
	if f.end != nil {
		f.end(t)
	}
	r := s.recover(t, f.name)
	r.lines = s.logLines() - lines
	return r
}

// recover measures how long it takes from now on until no symptom is left.
func (s *reservationShop) recover(t *testing.T, name string) recovery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), recoveryPatience)
	defer cancel()
	r := recovery{fault: name, after: map[string]time.Duration{}}
	var end time.Time
	if err := s.db.QueryRow(ctx, "select clock_timestamp()").Scan(&end); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var mu sync.Mutex
	var all sync.WaitGroup
	for symptom, look := range s.looks(end) {
		all.Go(func() {
			took, err := untilWell(ctx, began, look)
			mu.Lock()
			defer mu.Unlock()
			r.after[symptom] = took
			if err != nil {
				t.Errorf("%s: %s after %v: %v", name, symptom, recoveryPatience, err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		s.explain(t)
	}
	r.slowest = time.Duration(s.crowd.slowest.Load())
	return r
}

// untilWell asks until the answer is nil.
func untilWell(ctx context.Context, began time.Time, look func(context.Context) error) (time.Duration, error) {
	for {
		asked := time.Now()
		err := look(ctx)
		if err == nil {
			return asked.Sub(began), nil
		}
		if ctx.Err() != nil {
			return time.Since(began), err
		}
		pause(ctx, 50*time.Millisecond)
	}
}

// looks are the questions after the symptoms of a fault that ended at end, by the database's clock.
func (s *reservationShop) looks(end time.Time) map[string]func(context.Context) error {
	none := func(sql string) func(context.Context) error {
		return func(ctx context.Context) error {
			var n int
			if err := s.db.QueryRow(ctx, sql, end).Scan(&n); err != nil {
				return err
			}
			if n > 0 {
				return fmt.Errorf("%d left", n)
			}
			return nil
		}
	}
	return map[string]func(context.Context) error{
		"ready":     s.allReady,
		"answers":   s.allAnswer(),
		"outbox":    none("select count(*) from holdfast_outbox where created_at <= $1"),
		"due holds": none("select count(*) from reservations where status = 'held' and expires_at <= $1"),
		// Every change up to the end of the fault has been heard of, the expiry of what was due included.
		"read model": none(`select count(*) from reservations r left join reservation_states s on s.reservation_id = r.id
			where r.created_at <= $1 and (s.status is null or r.expires_at <= $1 and s.status = 'held')`),
	}
}

// readyClient gives a process as long for an answer as a load balancer would.
var readyClient = &http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

func (s *reservationShop) allReady(context.Context) error {
	errs := make([]error, len(s.roles))
	var all sync.WaitGroup
	for i, r := range s.roles {
		all.Go(func() { errs[i] = r.ready(readyClient) })
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// allAnswer wants a hold for every event through every api, each answered promptly.
func (s *reservationShop) allAnswer() func(context.Context) error {
	const promptly = 2 * time.Second
	type way struct {
		api   int
		event string
	}
	left := map[way]bool{}
	for api := range s.named("api") {
		for _, event := range s.crowd.events {
			left[way{api, event}] = true
		}
	}
	return func(ctx context.Context) error {
		var mu sync.Mutex
		var all sync.WaitGroup
		for _, w := range slices.Collect(maps.Keys(left)) { // the goroutines delete from it
			all.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, promptly)
				defer cancel()
				_, status, err := s.crowd.post(ctx, w.api, newShopKey(), "/api/reservations", holdOne(w.event))
				mu.Lock()
				defer mu.Unlock()
				if err == nil && status == http.StatusCreated {
					delete(left, w)
				}
			})
		}
		all.Wait()
		if len(left) > 0 {
			return fmt.Errorf("%d of 8 ways to hold a seat do not work", len(left))
		}
		return nil
	}
}

func (s *reservationShop) eventually(t *testing.T, check func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), recoveryPatience)
	defer cancel()
	if _, err := untilWell(ctx, time.Now(), func(context.Context) error { return check() }); err != nil {
		t.Fatal(err)
	}
}

// explain logs what the database's sessions do.
func (s *reservationShop) explain(t *testing.T) {
	t.Helper()
	rows, err := s.db.Query(t.Context(), `select format('%s %s, blocked by %s, since %s: %s', pid, state,
		pg_blocking_pids(pid), state_change, left(query, 200)) from pg_stat_activity where state <> 'idle' order by state_change`)
	if err != nil {
		t.Log(err)
		return
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	t.Logf("sessions (%v):\n%s", err, strings.Join(lines, "\n"))
}

// logLines counts what all processes have logged as a warning or worse.
func (s *reservationShop) logLines() int {
	n := 0
	for _, r := range s.roles {
		n += r.complaints()
	}
	return n
}

// judgeRecoveries prints the table and holds it against the goal.
func judgeRecoveries(t testing.TB, all []recovery) {
	t.Helper()
	var table strings.Builder
	fmt.Fprintf(&table, "\n%-40s %6s  %-10s", "seconds after the end of the fault", "all", "last")
	for _, name := range symptoms {
		fmt.Fprintf(&table, " %10s", name)
	}
	fmt.Fprintf(&table, " %12s %6s\n", "slow answer", "lines")
	for _, r := range all {
		total, last := r.total()
		fmt.Fprintf(&table, "%-40s %6.1f  %-10s", r.fault, total.Seconds(), last)
		for _, name := range symptoms {
			fmt.Fprintf(&table, " %10.1f", r.after[name].Seconds())
		}
		fmt.Fprintf(&table, " %12.1f %6d\n", r.slowest.Seconds(), r.lines)
		if total > recoverySlack*recoveryGoal {
			t.Errorf("%s: %s is back after %v, want %v", r.fault, last, total, recoveryGoal)
		}
	}
	t.Log(table.String())
}
