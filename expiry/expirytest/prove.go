package expirytest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Prove runs a sweep and its Emit on a real database under faults, as txretrytest.Proof describes. start
// makes a process as your program does: on the pool that it is given, it makes the expirypgx.Store. Each
// attempt is one expiry.Sweeper.Sweep. Proof.Reset writes the rows that are due, fewer than 200, so that
// they are one batch; give them a deadline that is no now(), since that is another one each time.
func Prove(t txretrytest.TB, p txretrytest.Proof, start func(pool *pgxpool.Pool) (*expirypgx.Store, error)) {
	t.Helper()
	fit := false
	prove.Run(t, prove.Proof(p), prove.Work{
		Name: "expirytest.Prove", Keyed: true, Sweeps: true,
		Start: func(ctx context.Context, pool *pgxpool.Pool) (func(ctx context.Context) prove.Outcome, error) {
			store, err := start(pool)
			if err == nil && !fit {
				err, fit = store.Fit(ctx), true
			}
			return func(ctx context.Context) prove.Outcome { return prove.Outcome{Err: sweep(ctx, store)} }, err
		},
	})
}

// sweep is that of a process which has just started: it knows of no rows at fault. A row that it gives up
// is an error, and so is an error that Emit has swallowed, whatever came of it.
func sweep(ctx context.Context, store driver.Store) error {
	batches := &batches{Store: store}
	sweeper, err := expiry.NewSweeper(batches, expiry.SweeperConfig{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	report, err := sweeper.Sweep(ctx)
	switch {
	case err != nil:
		return err
	case report.Poisoned > 0:
		return fmt.Errorf("%d rows are put in quarantine: %w", report.Poisoned, batches.last)
	}
	return batches.swallowed
}

// batches are those of a store that has been found fit to be swept.
type batches struct {
	driver.Store
	last, swallowed error
}

func (b *batches) SweepBatch(ctx context.Context, req driver.Request) (driver.Batch, error) {
	batch, err := b.Store.SweepBatch(ctx, req)
	if err != nil {
		b.last = err
	}
	if errors.Is(err, pgx.ErrTxCommitRollback) {
		b.swallowed = err
	}
	return batch, err
}
