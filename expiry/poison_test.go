package expiry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
)

// emitting is a store on the rows of w with a callback of its own in front of w's.
func (w *world) emitting(t *testing.T, first func(ctx context.Context, rows []expiry.Row) error) expiry.Store {
	t.Helper()
	store, err := expirytest.NewStore(w.manager, expirytest.Config{
		Active: w.table.Active, Expire: w.table.Expire,
		Now: func() time.Time { return time.Now().Add(w.ahead) },
		Emit: func(ctx context.Context, _ pgx.Tx, rows []expiry.Row) error {
			if err := first(ctx, rows); err != nil {
				return err
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, row := range rows {
				w.when[row.ID] = time.Now()
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func has(rows []expiry.Row, id string) bool {
	return slices.ContainsFunc(rows, func(r expiry.Row) bool { return r.ID == id })
}

// One row on which Emit hangs until BatchTimeout takes the others of its batch
// along for minutes at worst, but nobody else.
func TestHangingRowStopsTheOthersOnlyBriefly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		var hangs atomic.Int64
		store := w.emitting(t, func(ctx context.Context, rows []expiry.Row) error {
			if !has(rows, "bad") {
				return nil
			}
			hangs.Add(1)
			<-ctx.Done()
			return ctx.Err()
		})
		w.hold(t, "bad", -time.Hour)
		start := time.Now()
		for n := range 1000 {
			w.hold(t, fmt.Sprint("old ", n), -time.Minute)
		}
		poisoned := make(chan string, 10)
		sw := newSweeper(t, store, expiry.SweeperConfig{Hooks: expiry.Hooks{
			OnPoison: func(_ context.Context, id string, _ error) { poisoned <- id },
		}})
		stop := run(t, sw)
		defer stop()

		time.Sleep(30*time.Second + 200*time.Millisecond)
		if left := len(w.table.Active()); left != 200 {
			t.Errorf("%d rows are left after the first timeout, want the batch of 200", left)
		}
		worst := time.Duration(0)
		for n := range 60 { // rows that fall due while the search goes on
			id := fmt.Sprint("new ", n)
			deadline := w.hold(t, id, time.Second)
			sw.Wake(deadline)
			time.Sleep(5 * time.Second)
			w.mu.Lock()
			if when, ok := w.when[id]; ok {
				worst = max(worst, when.Sub(deadline))
			}
			w.mu.Unlock()
		}
		if worst > 32*time.Second {
			t.Errorf("a row that fell due during the search expired %v late", worst)
		}
		if id, left := <-poisoned, len(w.table.Active()); left != 1 || id != "bad" {
			t.Errorf("%d rows are left and %q is in quarantine, want the bad one", left, id)
		}
		found := hangs.Load()
		if found > 9 {
			t.Errorf("it took %d timeouts to find 1 row in 200", found)
		}
		time.Sleep(time.Until(start.Add(30 * time.Minute)))
		if more := hangs.Load() - found; more > 5 {
			t.Errorf("the row in quarantine cost %d timeouts in half an hour, want one per 5 minutes", more)
		}
	})
}

// A row in quarantine that hangs when it is tried again, by itself, says nothing
// about the batches of the others: they keep their size.
func TestHangingRowTriedAgainDoesNotShrinkBatches(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		store := w.emitting(t, func(ctx context.Context, rows []expiry.Row) error {
			if !has(rows, "bad") {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})
		w.hold(t, "bad", -time.Hour)
		sw := newSweeper(t, store, expiry.SweeperConfig{Quarantine: time.Minute})
		if _, err := sw.Sweep(t.Context()); err == nil {
			t.Fatal("the bad row has not run into BatchTimeout")
		}
		for range 10 { // sweeps that go through: the batches grow again
			if _, err := sw.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Minute)
		if _, err := sw.Sweep(t.Context()); err == nil {
			t.Fatal("the bad row was not tried again")
		}
		for n := range 200 {
			w.hold(t, fmt.Sprint(n), -time.Minute)
		}
		if r, err := sw.Sweep(t.Context()); err != nil || r.Batches > 2 || r.Expired != 200 {
			t.Errorf("got %+v, %v, want the others in one batch and a short one", r, err)
		}
	})
}

// More bad rows than the quarantine holds, at the head and all of one deadline,
// do not keep the sweeper from the rows behind them.
func TestPoisonedHeadDoesNotStarveTheTail(t *testing.T) {
	t.Parallel()
	for name, step := range map[string]time.Duration{"one deadline": 0, "many deadlines": time.Second} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			store := w.emitting(t, func(_ context.Context, rows []expiry.Row) error {
				if slices.ContainsFunc(rows, func(r expiry.Row) bool { return strings.HasPrefix(r.ID, "bad") }) {
					return errors.New("bad row")
				}
				return nil
			})
			for n := range 100 {
				w.hold(t, fmt.Sprintf("bad %03d", n), -time.Hour+time.Duration(n)*step)
				w.hold(t, fmt.Sprintf("tail %03d", n), -time.Hour+time.Duration(100+n)*step)
			}
			stop := run(t, newSweeper(t, store, expiry.SweeperConfig{BatchSize: 8, MaxQuarantine: 15}))
			defer stop()
			time.Sleep(5 * time.Minute)
			for _, row := range w.table.Active() {
				if !strings.HasPrefix(row.ID, "bad") {
					t.Fatalf("%s: %q and others still wait behind the bad rows", name, row.ID)
				}
			}
			if left := len(w.table.Active()); left != 100 {
				t.Errorf("%s: %d rows are left, want the bad ones", name, left)
			}
		})
	}
}

// Who knows the row at fault names it, and no search is needed.
func TestNamedRowIsNotSearchedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		calls := 0
		store := w.emitting(t, func(_ context.Context, rows []expiry.Row) error {
			calls++
			for _, row := range rows {
				if row.ID == "17" || row.ID == "150" {
					return fmt.Errorf("wrapped: %w", &expiry.RowError{ID: row.ID, Err: errors.New("bad row")})
				}
			}
			return nil
		})
		for n := range 200 {
			w.hold(t, fmt.Sprint(n), -time.Minute)
		}
		report, err := newSweeper(t, store, expiry.SweeperConfig{}).Sweep(t.Context())
		if err != nil || report.Expired != 198 || report.Poisoned != 2 || calls != 3 {
			t.Errorf("got %+v, %v after %d calls, want 198 expired, 2 set aside, 3 calls", report, err, calls)
		}
	})
}

func TestStuckCallIsReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.hold(t, "row", -time.Second)
		var once sync.Once
		sw := newSweeper(t, w.emitting(t, func(context.Context, []expiry.Row) error {
			once.Do(func() { time.Sleep(10 * time.Minute) }) // whatever its context says
			return nil
		}), expiry.SweeperConfig{})
		stop := run(t, sw)
		defer stop()
		time.Sleep(time.Minute)
		if err := sw.Ready(t.Context()); !errors.Is(err, expiry.ErrNotReady) || !strings.Contains(err.Error(), "stuck") {
			t.Errorf("Ready says %v while a batch is stuck", err)
		}
		time.Sleep(15 * time.Minute)
		if err := sw.Ready(t.Context()); err != nil || len(w.table.Active()) > 0 {
			t.Errorf("Ready says %v, and %d rows are left, when it no longer is", err, len(w.table.Active()))
		}
	})
}

func TestBudgetsEndASweepAndRunGoesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		for n := range 100 {
			w.hold(t, fmt.Sprint(n), -time.Minute)
		}
		w.set(nil, time.Second) // per batch
		cfg := expiry.SweeperConfig{BatchSize: 10, MaxBatches: 2}
		var batches []int
		cfg.Hooks.OnBatch = func(_ context.Context, b expiry.Batch, soFar expiry.Report) {
			batches = append(batches, b.Expired, soFar.Expired)
		}
		if r, err := newSweeper(t, w, cfg).Sweep(t.Context()); err != nil || !r.More || r.Batches != 2 || r.Expired != 20 {
			t.Errorf("got %+v, %v, want two batches and more", r, err)
		}
		if want := []int{10, 10, 10, 20}; !slices.Equal(batches, want) {
			t.Errorf("the batches were told as %v, want %v", batches, want)
		}
		cfg = expiry.SweeperConfig{BatchSize: 10, MaxDuration: 3 * time.Second}
		sw := newSweeper(t, w, cfg)
		if r, err := sw.Sweep(t.Context()); err != nil || !r.More || r.Expired != 30 {
			t.Errorf("got %+v, %v, want what fits into three seconds", r, err)
		}
		stop := run(t, sw)
		defer stop()
		time.Sleep(8 * time.Second)
		if left := len(w.table.Active()); left != 0 {
			t.Errorf("%d rows are left", left)
		}
	})
}

// checked is a store with a Check.
type checked struct {
	*world
	mu       sync.Mutex
	findings []expiry.Finding
	err      error
	calls    int
}

func (c *checked) Check(context.Context) ([]expiry.Finding, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	return c.findings, c.err
}

func (c *checked) answer(err error, findings ...expiry.Finding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err, c.findings = err, findings
}

func (c *checked) asked() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls
}

func TestUnfitStoreIsNotTouched(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &checked{world: newWorld(t)}
		c.hold(t, "row", -time.Second)
		c.answer(nil, expiry.Finding{Component: "store", Problem: "no index", Mend: "CREATE INDEX"}, expiry.Finding{Problem: "no zone"})
		sw := newSweeper(t, c, expiry.SweeperConfig{})
		for _, err := range []error{sw.Run(t.Context()), func() error { _, err := sw.Sweep(t.Context()); return err }()} {
			unfit, ok := errors.AsType[*expiry.CheckError](err)
			if !ok || len(unfit.Findings) != 2 || !strings.Contains(err.Error(), "CREATE INDEX") || !strings.Contains(err.Error(), "no zone") {
				t.Errorf("got %v, want both findings", err)
			}
		}
		if batches, looks := c.counts(); batches+looks > 0 || len(c.table.Active()) != 1 {
			t.Errorf("the store was touched: %d batches, %d looks", batches, looks)
		}

		c.answer(errors.New("server is down"))
		stop := run(t, sw)
		defer stop()
		time.Sleep(time.Minute)
		if len(c.table.Active()) != 1 {
			t.Error("swept without a check")
		}
		c.answer(nil)
		time.Sleep(time.Minute)
		calls := c.asked()
		time.Sleep(time.Hour)
		if left, more := len(c.table.Active()), c.asked()-calls; left != 0 || more != 0 {
			t.Errorf("%d rows left, %d checks more", left, more)
		}
	})
}
