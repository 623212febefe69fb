package expiry_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/internal/check"
)

func TestPassingFaultIsBackedOff(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		sw := newSweeper(t, w, expiry.SweeperConfig{})
		if err := sw.Ready(t.Context()); err == nil {
			t.Errorf("ready before Run: %v", err)
		}
		w.set(errors.New("server is down"), 0)
		stop := run(t, sw)
		time.Sleep(10 * time.Minute)
		if err := sw.Ready(t.Context()); err == nil {
			t.Errorf("ready while the store fails: %v", err)
		}
		if batches, queries := w.counts(); batches+queries > 130 {
			t.Errorf("10 minutes of downtime cost %d batches and %d queries", batches, queries)
		}
		w.hold(t, "row", -time.Second)
		w.set(nil, 0)
		time.Sleep(time.Minute)
		if _, state, _ := w.table.Get("row"); state != "expired" {
			t.Errorf("row is %s after the store came back", state)
		}
		if err := sw.Ready(t.Context()); err != nil {
			t.Errorf("not ready: %v", err)
		}
		stop()
		if err := sw.Ready(t.Context()); err == nil {
			t.Errorf("ready after Run: %v", err)
		}
	})
}

func TestShutdown_finishesTheRunningBatch(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for n := range 10 {
			w.hold(t, fmt.Sprint(n), -time.Second)
		}
		w.set(nil, 3*time.Second)
		stop := run(t, newSweeper(t, w, expiry.SweeperConfig{BatchSize: 4, ShutdownTimeout: 5 * time.Second}))
		time.Sleep(time.Second)
		start := time.Now()
		stop()
		if took := time.Since(start); took != 2*time.Second {
			t.Errorf("shutdown took %v, want the rest of the batch, 2s", took)
		}
		if left := len(w.table.Active()); left != 6 {
			t.Errorf("%d rows are left, want 6", left)
		}
	})
}

func TestShutdownTimeoutAndBatchTimeout(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.set(nil, time.Hour)
		stop := run(t, newSweeper(t, w, expiry.SweeperConfig{ShutdownTimeout: 5 * time.Second, BatchTimeout: time.Minute}))
		time.Sleep(time.Second)
		start := time.Now()
		stop()
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("shutdown took %v, want 5s", took)
		}

		start = time.Now()
		_, err := newSweeper(t, w, expiry.SweeperConfig{BatchTimeout: 7 * time.Second}).Sweep(t.Context())
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took != 7*time.Second {
			t.Errorf("a stuck batch ended after %v with %v", took, err)
		}
	})
}

func TestQuarantineEndsAndIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var mu sync.Mutex
		bad := true
		store, err := expirytest.New(w.manager, expirytest.Config{
			Active: w.table.Active, Expire: w.table.Expire,
			Emit: func(context.Context, pgx.Tx, []expiry.Row) error {
				mu.Lock()
				defer mu.Unlock()
				if bad {
					return errors.New("bad row")
				}
				return nil
			},
		})
		must(t, err)
		for n := range 5 {
			w.hold(t, fmt.Sprint(n), -time.Second)
		}
		cfg := expiry.SweeperConfig{Quarantine: time.Minute}
		if r, err := newSweeper(t, store, cfg).Tune(expiry.Tuning{MaxQuarantine: 3}).Sweep(t.Context()); !errors.Is(err, expiry.ErrQuarantineFull) || r.Poisoned != 3 {
			t.Errorf("got %+v, %v, want ErrQuarantineFull after 3", r, err)
		}
		stop := run(t, newSweeper(t, store, cfg).Tune(expiry.Tuning{MaxQuarantine: 5}))
		time.Sleep(30 * time.Second)
		mu.Lock()
		bad = false
		mu.Unlock()
		if left := len(w.table.Active()); left != 5 {
			t.Errorf("%d rows are left in quarantine, want 5", left)
		}
		time.Sleep(time.Minute)
		stop()
		if left := len(w.table.Active()); left != 0 {
			t.Errorf("%d rows are left after the quarantine", left)
		}
	})
}

// slow is a store that needs time for every row.
type slow struct {
	*world
	perRow time.Duration
}

func (s slow) SweepBatch(ctx context.Context, req driver.Request) (driver.Batch, error) {
	s.set(nil, s.perRow*time.Duration(min(req.Limit, len(s.table.Active()))))
	return s.world.SweepBatch(ctx, req)
}

func TestBatchesThatTakeTooLongShrink(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for n := range 500 {
			w.hold(t, fmt.Sprint(n), -time.Second)
		}
		stop := run(t, newSweeper(t, slow{w, time.Second}, expiry.SweeperConfig{BatchTimeout: 30 * time.Second}))
		time.Sleep(15 * time.Minute)
		stop()
		if left := len(w.table.Active()); left != 0 {
			t.Errorf("%d of 500 rows are left", left)
		}
		if batches, _ := w.counts(); batches > 40 {
			t.Errorf("500 rows, 30 of which fit into BatchTimeout, took %d batches", batches)
		}
	})
}

// blind is a store whose Look fails.
type blind struct{ *world }

func (blind) Look(context.Context, []string) (driver.Outlook, error) {
	return driver.Outlook{}, errors.New("query failed")
}

func TestSweeper_sweepsDespiteFailingLook(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		defer run(t, newSweeper(t, blind{w}, expiry.SweeperConfig{}))()
		time.Sleep(time.Second)
		deadline := w.hold(t, "row", time.Minute)
		time.Sleep(time.Hour)
		w.expiredWithin(t, "row", deadline, time.Minute)
		if batches, _ := w.counts(); batches > 750 {
			t.Errorf("an hour cost %d batches", batches)
		}
	})
}

// taken is a store in which other transactions hold all due rows. It sees the rows and gets none, or gets them and
// changes none.
type taken struct {
	*world
	claimed bool
}

func (s taken) SweepBatch(_ context.Context, req driver.Request) (driver.Batch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.batches = append(s.batches, time.Now())
	if s.claimed {
		return driver.Batch{Claimed: req.Limit}, nil
	}
	return driver.Batch{}, nil
}

func TestRowsThatOthersHoldCostLittle(t *testing.T) {
	t.Parallel()
	for _, claimed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.hold(t, "row", -time.Second)
			stop := run(t, newSweeper(t, taken{w, claimed}, expiry.SweeperConfig{}))
			time.Sleep(time.Minute)
			stop()
			if batches, queries := w.counts(); batches > 70 || queries > 70 {
				t.Errorf("claimed %v: a minute cost %d batches and %d queries", claimed, batches, queries)
			}
		})
	}
}

type panics struct{}

func (panics) SweepBatch(context.Context, driver.Request) (driver.Batch, error) { panic("boom") }
func (panics) Look(context.Context, []string) (driver.Outlook, error)           { panic("boom") }

func TestPanickingStoreDoesNotEndRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		stop := run(t, newSweeper(t, panics{}, expiry.SweeperConfig{}))
		time.Sleep(time.Minute)
		stop()
	})
}

// checked is a store with a scripted Fit.
type checked struct {
	*world
	mu    sync.Mutex
	err   error
	calls int
}

func (c *checked) Fit(context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	return c.err
}

func (c *checked) answer(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}

func (c *checked) asked() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls
}

func TestUnfitStoreIsNotSwept(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &checked{world: newWorld(t)}
		c.hold(t, "row", -time.Second)
		c.answer(errors.Join(check.New("store", "no index", "CREATE INDEX"), check.New("store", "no zone", "ALTER TABLE")))
		sw := newSweeper(t, c, expiry.SweeperConfig{})
		for _, err := range []error{sw.Check(t.Context()), sw.Run(t.Context()), func() error { _, err := sw.Sweep(t.Context()); return err }()} {
			if err == nil || !strings.Contains(err.Error(), "CREATE INDEX") || !strings.Contains(err.Error(), "no zone") {
				t.Errorf("got %v, want both findings", err)
			}
		}
		if batches, queries := c.counts(); batches+queries > 0 || len(c.table.Active()) != 1 {
			t.Errorf("the store was touched: %d batches, %d queries", batches, queries)
		}

		c.answer(errors.New("server is down"))
		defer run(t, sw)()
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
