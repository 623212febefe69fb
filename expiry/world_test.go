package expiry_test

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// world is a table and a store on it that notes when each row expired.
type world struct {
	manager *txretrytest.Manager
	table   *expirytest.Table
	store   driver.Store

	mu      sync.Mutex
	when    map[string]time.Time
	looks   int
	batches int
	fail    error         // what the store answers, if anything
	hang    time.Duration // how long a batch takes
	ahead   time.Duration // of the store's clock; set it before anything else
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{manager: txretrytest.New(txretrytest.Config{}), table: expirytest.NewTable(), when: map[string]time.Time{}}
	w.store = w.emitting(t, func(context.Context, []expiry.Row) error { return nil })
	return w
}

func (w *world) SweepBatch(ctx context.Context, req driver.Request) (driver.Batch, error) {
	w.mu.Lock()
	w.batches++
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
	return w.store.SweepBatch(ctx, req)
}

func (w *world) Look(ctx context.Context, skip []string) (driver.Outlook, error) {
	w.mu.Lock()
	w.looks++
	fail := w.fail
	w.mu.Unlock()
	if fail != nil {
		return driver.Outlook{}, fail
	}
	return w.store.Look(ctx, skip)
}

func (w *world) set(fail error, hang time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fail, w.hang = fail, hang
}

func (w *world) counts() (batches, looks int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.batches, w.looks
}

func (w *world) hold(t *testing.T, id string, d time.Duration) time.Time {
	t.Helper()
	deadline := time.Now().Add(w.ahead + d)
	err := w.manager.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		return w.table.Put(tx, id, deadline, expirytest.Held)
	})
	if err != nil {
		t.Fatal(err)
	}
	return deadline
}

// expiredWithin fails unless the row expired after its deadline, and by how much.
func (w *world) expiredWithin(t *testing.T, id string, deadline time.Time, late time.Duration) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	when, ok := w.when[id]
	if !ok || when.Before(deadline) || when.Sub(deadline) > late {
		t.Errorf("row %s with deadline %v expired at %v (%v)", id, deadline, when, ok)
	}
}

// emitting is a store on the rows of w that notes them as expired behind a callback of its own.
func (w *world) emitting(t *testing.T, first func(ctx context.Context, rows []expiry.Row) error) driver.Store {
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

func newSweeper(t *testing.T, s driver.Store, cfg expiry.SweeperConfig) *expiry.Sweeper {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	sw, err := expiry.NewSweeper(s, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return sw
}

// run starts Run and returns a function that stops it and checks its answer.
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
