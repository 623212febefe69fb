package expiry_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func at(s string) time.Time {
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		panic(err)
	}
	return t
}

// rows is a table in memory that lists its held rows.
type rows struct {
	*expirytest.Store
	mu  sync.Mutex
	ids []string
}

func (r *rows) put(tx pgx.Tx, id string, deadline time.Time, state string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Contains(r.ids, id) {
		r.ids = append(r.ids, id)
	}
	return r.Put(tx, id, deadline, state)
}

func (r *rows) Active() []expiry.Row {
	r.mu.Lock()
	defer r.mu.Unlock()
	var active []expiry.Row
	for _, id := range r.ids {
		if deadline, state, ok := r.Get(id); ok && state == "held" {
			active = append(active, expiry.Row{ID: id, Deadline: deadline})
		}
	}
	return active
}

func (r *rows) Expire(_ context.Context, tx pgx.Tx, row expiry.Row) error {
	deadline, state, _ := r.Get(row.ID)
	if state != "held" {
		return errors.New("not held")
	}
	return r.Put(tx, row.ID, deadline, "expired")
}

// world is a table with a store that records when each row expired.
type world struct {
	manager *txretrytest.Manager
	table   *rows
	store   *expirytest.Store

	mu      sync.Mutex
	when    map[string]time.Time
	queries int
	batches []time.Time   // start of each batch
	fail    error         // if set, the error of the store
	hang    time.Duration // duration of a batch
	ahead   time.Duration // offset of the store's clock; set it first
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{manager: txretrytest.New(txretrytest.Config{}), when: map[string]time.Time{}}
	plain, err := expirytest.New(w.manager, expirytest.Config{})
	must(t, err)
	w.table = &rows{Store: plain}
	w.store = w.emitting(t, func(context.Context, []expiry.Row) error { return nil })
	return w
}

// inBubble runs a test in parallel, with its own world and a virtual clock.
func inBubble(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { test(t, newWorld(t)) })
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) SweepBatch(ctx context.Context, req driver.Request) (driver.Batch, error) {
	w.mu.Lock()
	w.batches = append(w.batches, time.Now())
	fail, hang := w.fail, w.hang
	w.mu.Unlock()
	if hang > 0 {
		select {
		case <-time.After(hang):
		case <-ctx.Done():
			return driver.Batch{}, ctx.Err()
		}
	}
	if fail != nil {
		return driver.Batch{}, fail
	}
	if req.After.ID != "" {
		req.After.Deadline = req.After.Deadline.Add(-w.ahead)
	}
	b, err := w.store.SweepBatch(ctx, req)
	if failed, ok := errors.AsType[*driver.BatchError](err); ok {
		failed.Last.Deadline = failed.Last.Deadline.Add(w.ahead)
	}
	if b.Last.ID != "" {
		b.Last.Deadline = b.Last.Deadline.Add(w.ahead)
	}
	return b, err
}

func (w *world) Look(ctx context.Context, skip []string) (driver.Outlook, error) {
	w.mu.Lock()
	w.queries++
	fail := w.fail
	w.mu.Unlock()
	if fail != nil {
		return driver.Outlook{}, fail
	}
	o, err := w.store.Look(ctx, skip)
	o.Now = o.Now.Add(w.ahead)
	return o, err
}

func (w *world) Background(ctx context.Context, wake func(time.Time)) { w.store.Background(ctx, wake) }

func (w *world) Wake(at time.Time) { w.store.Wake(at) }

func (w *world) set(fail error, hang time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fail, w.hang = fail, hang
}

func (w *world) counts() (batches, queries int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.batches), w.queries
}

// swept returns the start of each batch. A sweep with few or no due rows is one batch.
func (w *world) swept() []time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.batches)
}

func (w *world) hold(t *testing.T, id string, d time.Duration) time.Time {
	t.Helper()
	deadline := time.Now().Add(w.ahead + d)
	err := w.manager.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		return w.table.put(tx, id, deadline, "held")
	})
	must(t, err)
	return deadline
}

// expiredWithin fails unless the row expired after its deadline, at most late after it.
func (w *world) expiredWithin(t *testing.T, id string, deadline time.Time, late time.Duration) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	when, ok := w.when[id]
	if !ok || when.Before(deadline) || when.Sub(deadline) > late {
		t.Errorf("row %s with deadline %v expired at %v (%v)", id, deadline, when, ok)
	}
}

// active returns the rows by this host's clock.
func (w *world) active() []expiry.Row {
	active := w.table.Active()
	for i := range active {
		active[i].Deadline = active[i].Deadline.Add(-w.ahead)
	}
	return active
}

// emitting returns a store on the rows of w. It calls first, and then records the rows as expired.
func (w *world) emitting(t *testing.T, first func(ctx context.Context, rows []expiry.Row) error) *expirytest.Store {
	t.Helper()
	store, err := expirytest.New(w.manager, expirytest.Config{
		Active: w.active, Expire: w.table.Expire,
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
	must(t, err)
	return store
}

func has(rows []expiry.Row, id string) bool {
	return slices.ContainsFunc(rows, func(r expiry.Row) bool { return r.ID == id })
}

func newSweeper(t *testing.T, s driver.Store, cfg expiry.SweeperConfig) *expiry.Sweeper {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	sw, err := expiry.NewSweeper(s, cfg)
	must(t, err)
	return sw
}

// accused is a log handler that keeps the ids of quarantined rows.
type accused struct {
	slog.Handler
	rows chan string
}

func newAccused() accused { return accused{slog.DiscardHandler, make(chan string, 1000)} }

func (accused) Enabled(context.Context, slog.Level) bool { return true }

func (a accused) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(attr slog.Attr) bool {
		if attr.Key == "row" {
			a.rows <- attr.Value.String()
		}
		return true
	})
	return nil
}

// run starts Run and returns a function that stops it and checks its result.
func run(t *testing.T, sw *expiry.Sweeper) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- sw.Run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	}
}
