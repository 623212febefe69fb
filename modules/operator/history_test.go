package operator_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/history"
	"github.com/holdfast-go/holdfast/modules/operator/page"
)

// onBothHistories runs a test on a history in memory and on one in Postgres.
func onBothHistories(t *testing.T, test func(*testing.T, operator.History)) {
	t.Helper()
	t.Parallel()
	t.Run("memory", func(t *testing.T) { test(t, &operator.MemoryHistory{}) })
	t.Run("Postgres", func(t *testing.T) {
		pool, _ := pgtest.NewSchema(t)
		h := must(operator.NewPostgresHistory(pool))(t)
		if err := h.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "is missing") {
			t.Errorf("without the table: %v", err)
		}
		check(t, h.Migrate(t.Context()))
		check(t, h.Migrate(t.Context()))
		check(t, h.Check(t.Context()))
		test(t, h)
	})
}

// add stores the report of a new process.
func add(t testing.TB, h operator.History, figures ...operator.Figures) (asked bool) {
	t.Helper()
	asked, err := h.Add(t.Context(), operator.Process{ID: uuid.New(), Beat: 1}, figures)
	if err != nil {
		t.Error(err)
	}
	return asked
}

// sum adds up the counts of a part, and returns its newest measured figures.
func sum(t *testing.T, h operator.History, day bool, part string) (total, last operator.Figures) {
	t.Helper()
	for _, f := range must(h.Read(t.Context(), day))(t) {
		if f.Part != part {
			continue
		}
		total.Done, total.Failed, total.Retried, total.Problems = total.Done+f.Done, total.Failed+f.Failed, total.Retried+f.Retried, max(total.Problems, f.Problems)
		if f.Measured {
			last = f
		}
	}
	return total, last
}

// Several processes add up, in both resolutions. A measured number stays until it is measured again.
func TestHistory_addsUp(t *testing.T) {
	onBothHistories(t, func(t *testing.T, h operator.History) {
		const processes, times = 4, 25
		var adding sync.WaitGroup
		for range processes {
			adding.Go(func() {
				for range times {
					add(t, h, operator.Figures{Part: "outbox", Done: 2, Failed: 1}, operator.Figures{Part: "billing", Done: 1, Retried: 1, Problems: 1})
				}
			})
		}
		adding.Wait()
		add(t, h, operator.Figures{Part: "outbox", Measured: true, Waiting: 3, Retrying: 4, Dead: 5, Lag: 6 * time.Second})
		add(t, h, operator.Figures{Part: "outbox"}, operator.Figures{Part: "billing"})
		for _, day := range []bool{false, true} {
			total, last := sum(t, h, day, "outbox")
			if total.Done != 2*processes*times || total.Failed != processes*times || last.Waiting != 3 || last.Retrying != 4 || last.Dead != 5 || last.Lag != 6*time.Second {
				t.Errorf("day %v: outbox %+v, %+v", day, total, last)
			}
			total, last = sum(t, h, day, "billing")
			if total.Done != processes*times || total.Retried != processes*times || total.Problems != 1 || last.Measured {
				t.Errorf("day %v: billing %+v, %+v", day, total, last)
			}
		}
	})
}

// Add reports whether all its parts were asked in the current step, so that one process asks for all, also while a part does
// not answer.
func TestHistory_askedOnce(t *testing.T) {
	onBothHistories(t, func(t *testing.T, h operator.History) {
		testenv.Eventually(t, func() error { // a step may end in between
			add(t, h, operator.Figures{Part: "a", Asked: true})
			one := add(t, h, operator.Figures{Part: "a"})
			both := add(t, h, operator.Figures{Part: "a"}, operator.Figures{Part: "b"})
			if !one || both {
				return fmt.Errorf("a was asked: %v; a and b were: %v", one, both)
			}
			return nil
		})
	})
}

// An hour of steps of 10 s and a day of steps of 5 min is all that is kept.
func TestMemoryHistory_isBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h, self := &operator.MemoryHistory{}, operator.Process{ID: uuid.New()}
		for range 30 * 60 * 6 {
			self.Beat++
			must(h.Add(t.Context(), self, []operator.Figures{{Part: "a", Done: 1}}))(t)
			time.Sleep(10 * time.Second)
		}
		hour, day := len(must(h.Read(t.Context(), false))(t)), len(must(h.Read(t.Context(), true))(t))
		if hour < 360 || hour > 361 || day < 288 || day > 289 {
			t.Errorf("%d and %d steps are kept", hour, day)
		}
	})
}

func TestPostgresHistory_prunes(t *testing.T) {
	t.Parallel()
	pool, _ := pgtest.NewSchema(t)
	h := must(operator.NewPostgresHistory(pool))(t)
	check(t, h.Migrate(t.Context()))
	_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_history (step, at, part, done, failed, retried, problems, asked)
		SELECT step, now() - make_interval(mins => age), 'a', 1, 0, 0, 0, false FROM (VALUES (10, 59), (10, 61), (300, 1439), (300, 1441)) AS old(step, age)`)
	check(t, err)
	_, err = pool.Exec(t.Context(), `INSERT INTO holdfast_process SELECT gen_random_uuid(), 1, '', age, '', '{}', now(), now() - make_interval(mins => age), 0, '[]'
		FROM (VALUES (9), (11), (1439), (1441)) AS old(age)`)
	check(t, err)
	_, err = h.Add(t.Context(), operator.Process{PID: 1}, nil)
	check(t, err)
	var left int
	check(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM holdfast_history").Scan(&left))
	if left != 2 {
		t.Errorf("%d rows are left", left)
	}
	if all := must(h.Processes(t.Context()))(t); len(all) != 2 || all[0].PID+all[1].PID != 10 {
		t.Errorf("these processes are left: %+v", all)
	}
	check(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM holdfast_process").Scan(&left))
	if left != 4 { // their last reports do not count twice
		t.Errorf("%d processes are known", left)
	}
}

// The figures of a server whose clock differs have the times of this host.
func TestPostgresHistory_clockSkew(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{5 * time.Minute, -5 * time.Minute} {
		u := must(url.Parse(pgtest.URL(t)))(t)
		query := u.Query()
		query.Set("search_path", query.Get("search_path")+",pg_catalog")
		u.RawQuery = query.Encode()
		pool := pgtest.Pool(t, u.String(), 4)
		must(pool.Exec(t.Context(), fmt.Sprintf("CREATE FUNCTION now() RETURNS timestamptz LANGUAGE sql STABLE AS $$SELECT pg_catalog.now() + interval '%d s'$$", int(skew.Seconds()))))(t)
		h := must(operator.NewPostgresHistory(pool))(t)
		check(t, h.Migrate(t.Context()))
		add(t, h, operator.Figures{Part: "outbox", Done: 1})
		for _, f := range must(h.Read(t.Context(), false))(t) {
			if now := time.Now(); f.At.After(now.Add(time.Minute)) || f.At.Before(now.Add(-2*time.Minute)) { // timing: the skew is five minutes
				t.Errorf("the clock of the server is off by %v: a step began at %v, now it is %v", skew, f.At, now)
			}
		}
		if total, _ := sum(t, h, false, "outbox"); total.Done != 1 {
			t.Errorf("%+v", total)
		}
	}
}

// A report that arrives again after an hour counts once. Processes that start later are shown although very many have ended.
func TestMemoryHistory_late(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := &operator.MemoryHistory{}
		from, done := operator.Process{ID: uuid.New(), Beat: 7}, []operator.Figures{{Part: "a", Done: 1}}
		for range 2 {
			must(h.Add(t.Context(), from, done))(t)
			time.Sleep(time.Hour)
		}
		if total, _ := sum(t, h, true, "a"); total.Done != 1 {
			t.Errorf("%d done, want 1", total.Done)
		}
		for n := range 1500 {
			must(h.Add(t.Context(), operator.Process{ID: uuid.New(), Beat: 1, PID: n, Since: time.Now()}, nil))(t)
			time.Sleep(time.Millisecond)
		}
		if all := must(h.Processes(t.Context()))(t); len(all) != 1000 || all[999].PID != 1499 {
			t.Errorf("%d processes, the last is %d", len(all), all[len(all)-1].PID)
		}
	})
}

// failing is a history that is down for a while, or loses its answers.
type failing struct {
	operator.MemoryHistory
	down, silent bool
}

func (f *failing) Add(ctx context.Context, from operator.Process, figures []operator.Figures) (bool, error) {
	if f.down {
		return false, errors.New("it is down")
	}
	measured, err := f.MemoryHistory.Add(ctx, from, figures)
	if f.silent {
		return false, errors.New("the answer is lost")
	}
	return measured, err
}

// A recorder writes the counts and the depths of a service. Counts that could not be written are written later.
func TestRecorder(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if _, err := history.New(r.cfg); err == nil {
		t.Error("a recorder needs a history")
	}
	h := &failing{down: true}
	r.cfg.History = h
	recorder := must(history.New(r.cfg))(t)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	check(t, recorder.Run(ctx))
	h.down = false
	ctx, stop = context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- recorder.Run(ctx) }()
	testenv.Eventually(t, func() error {
		if _, last := sum(t, h, false, "holds"); !last.Measured {
			return errors.New("nothing is measured")
		}
		return nil
	})
	stop()
	check(t, <-ended)
	total, last := sum(t, h, false, "outbox")
	if total.Done != 0 || total.Failed != 2 || total.Retried != 0 || last.Dead != 2 {
		t.Errorf("outbox: %+v, %+v", total, last)
	}
	if total, last = sum(t, h, false, "billing"); total.Failed != 3 || last.Dead != 3 {
		t.Errorf("billing: %+v, %+v", total, last)
	}
	if _, last = sum(t, h, false, "holds"); last.Waiting != 2 || last.Lag < time.Minute {
		t.Errorf("holds: %+v", last)
	}
	s := serve(t, r, page.Config{})
	s.get(t, "", 200, "Done, last hour", `<td class="number">0</td><td class="number">5</td>`, "billing: 3 dead letters for ", `<svg class="spark"`, "Show table")
	s.get(t, "?part=billing&span=day", 200, "Done, last day", `<td class="number">0</td><td class="number">3</td>`, `data-stream="live?part=billing&span=day"`)
	s.get(t, "groups?from=billing", 200, "Dead, last hour", "3 dead")
	s.get(t, "waiting", 200, "Waiting, last hour")
	if body := newSite(t, page.Config{}).get(t, "", 200); strings.Contains(body, "<svg") {
		t.Errorf("there is a chart without a history: %s", body)
	}
}

// A report whose answer is lost is sent again, and counts once.
func TestRecorder_countsOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, loses := range []func(*failing, bool){
		func(h *failing, on bool) { h.silent = on }, func(h *failing, on bool) { h.down = on },
	} {
		h := &failing{}
		r.cfg.History = h
		recorder := must(history.New(r.cfg))(t)
		record := func() {
			ctx, stop := context.WithCancel(t.Context())
			stop()
			check(t, recorder.Run(ctx))
		}
		loses(h, true)
		record()
		record()
		loses(h, false)
		record()
		if total, _ := sum(t, h, false, "billing"); total.Failed != 3 {
			t.Errorf("%d failures are counted, want 3", total.Failed)
		}
	}
}

// A process is listed from its first report to its end. Its messages have the ages that they had then.
func TestHistory_processes(t *testing.T) {
	onBothHistories(t, func(t *testing.T, h operator.History) {
		began := time.Now()
		one := operator.Process{
			ID: uuid.New(), Beat: 1, Host: "a\x00b", PID: 7, Version: "v1.2.3", Roles: append([]string{"relay out\x00box"}, make([]string, 200)...),
			Since: began.Add(-time.Hour), InWork: 12,
		}
		for i := range 12 {
			one.Slowest = append(one.Slowest, driver.Running{
				Consumer: "billing", ID: uuid.New(), Name: strings.Repeat("n", 200), Key: "k\x00", Attempt: 2,
				Since: began.Add(time.Duration(i-60) * time.Minute), Until: began.Add(time.Duration(i-59) * time.Minute),
			})
		}
		other := operator.Process{ID: uuid.New(), Beat: 1, Since: began.Add(-time.Minute)}
		for _, p := range []operator.Process{other, one} {
			_, err := h.Add(t.Context(), p, []operator.Figures{{Part: "billing", Done: 1}})
			check(t, err)
		}
		all := must(h.Processes(t.Context()))(t)
		if len(all) != 2 || all[0].ID != one.ID || all[1].ID != other.ID {
			t.Fatalf("processes %+v", all)
		}
		near := func(a, b time.Time) bool { return a.Sub(b).Abs() < time.Minute/2 } // timing: ages of stored times, not speed
		p := all[0]
		if p.Host != "a b" || p.PID != 7 || p.Version != "v1.2.3" || len(p.Roles) != 100 || p.Roles[0] != "relay out box" ||
			p.InWork != 12 || !near(p.Since, one.Since) || !near(p.Seen, began) {
			t.Errorf("process %+v", p)
		}
		if len(p.Slowest) != 10 {
			t.Fatalf("%d messages", len(p.Slowest))
		}
		m, want := p.Slowest[0], one.Slowest[0]
		if m.Consumer != "billing" || m.ID != want.ID || m.Name != strings.Repeat("n", 100) || m.Key != "k " || m.Attempt != 2 ||
			!near(m.Since, want.Since) || !near(m.Until, want.Until) {
			t.Errorf("message %+v", m)
		}
		one.Slowest, one.InWork = nil, 0
		_, err := h.Add(t.Context(), one, []operator.Figures{{Part: "billing", Done: 1}}) // it arrives again
		check(t, err)
		if total, _ := sum(t, h, false, "billing"); total.Done != 2 {
			t.Errorf("%d done, want 2", total.Done)
		}
		one.Beat++
		_, err = h.Add(t.Context(), one, []operator.Figures{{Part: "billing", Done: 1}})
		check(t, err)
		if all = must(h.Processes(t.Context()))(t); all[0].InWork != 0 || len(all[0].Slowest) != 0 {
			t.Errorf("later: %+v", all[0])
		}
		if total, _ := sum(t, h, false, "billing"); total.Done != 3 {
			t.Errorf("%d done, want 3", total.Done)
		}
		check(t, h.Leave(t.Context(), one.ID))
		total, _ := sum(t, h, false, "billing")
		_, err = h.Add(t.Context(), one, []operator.Figures{{Part: "billing", Done: 1}}) // it arrives once more
		check(t, err)
		if again, _ := sum(t, h, false, "billing"); again.Done != total.Done {
			t.Errorf("%d done, want %d", again.Done, total.Done)
		}
		if all = must(h.Processes(t.Context()))(t); len(all) != 1 || all[0].ID != other.ID {
			t.Errorf("after the end: %+v", all)
		}
	})
}

// BenchmarkPostgresHistory is one record of a service with ten parts. A process records every 10 s.
func BenchmarkPostgresHistory(b *testing.B) {
	pool, _ := pgtest.NewSchema(b)
	h, err := operator.NewPostgresHistory(pool)
	if err != nil {
		b.Fatal(err)
	}
	if err := h.Migrate(b.Context()); err != nil {
		b.Fatal(err)
	}
	var figures []operator.Figures
	for n := range 10 {
		figures = append(figures, operator.Figures{Part: fmt.Sprint("part ", n), Done: 1000, Measured: true})
	}
	from := operator.Process{ID: uuid.New(), Host: "host", Version: "v1.2.3", Roles: []string{"relay outbox"}, Since: time.Now()}
	for b.Loop() {
		from.Beat++
		if _, err := h.Add(b.Context(), from, figures); err != nil {
			b.Fatal(err)
		}
	}
}
