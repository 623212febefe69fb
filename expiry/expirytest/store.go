// Package expirytest is an in-memory stand-in for expirypgx, for unit tests and
// demonstrations without a database. [Store] works on rows that live in your own
// memory, or in a [Table], inside the transactions of txretrytest.
package expirytest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/txretry"
)

// Config says where the rows are.
type Config struct {
	// Active returns the rows that can expire, due or not, in any order. It is
	// called inside a transaction, so it sees what is committed. Required.
	Active func() []expiry.Row

	// Expire changes the state of one row through txretrytest.Effect. Required.
	Expire func(ctx context.Context, tx pgx.Tx, row expiry.Row) error

	// Emit is called in the same transaction with the rows of the batch, longest
	// overdue first, as expirypgx.Config.Emit is. Nil only changes the state.
	Emit func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error
}

// Store is an expiry.Store in memory. Make it with NewStore. It is safe for
// concurrent use as far as Config's functions are; it calls them in transactions
// only.
type Store struct {
	transactor txretry.Transactor
	cfg        Config
}

// NewStore returns a Store whose batches run through t, a txretrytest.Manager.
func NewStore(t txretry.Transactor, cfg Config) (*Store, error) {
	var errs []error
	if t == nil {
		errs = append(errs, errors.New("expirytest: transactor is nil"))
	}
	if cfg.Active == nil {
		errs = append(errs, errors.New("expirytest: Config.Active is nil"))
	}
	if cfg.Expire == nil {
		errs = append(errs, errors.New("expirytest: Config.Expire is nil"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Store{transactor: t, cfg: cfg}, nil
}

// SweepBatch implements expiry.Store.
func (s *Store) SweepBatch(ctx context.Context, req expiry.Request) (expiry.Batch, error) {
	if req.Limit < 1 {
		return expiry.Batch{}, fmt.Errorf("expirytest: Request.Limit is %d, must be positive", req.Limit)
	}
	var batch expiry.Batch
	var ids []string
	var own error // of Expire or Emit
	opts := txretry.Options{Name: "expiry.sweep"}
	err := s.transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		now := time.Now()
		rows := s.due(now, req)
		batch, ids, own = expiry.Batch{Claimed: len(rows), Expired: len(rows)}, nil, nil
		if len(rows) == 0 {
			return nil
		}
		batch.Lag = now.Sub(rows[0].Deadline)
		for _, row := range rows {
			ids = append(ids, row.ID)
		}
		own = s.expire(ctx, tx, rows)
		return own
	})
	var locked *txretry.LockTimeoutError
	var unknown *txretry.CommitUnknownError
	switch {
	case err == nil:
		return batch, nil
	case own != nil && ctx.Err() == nil && !errors.As(err, &locked) && !errors.As(err, &unknown):
		return expiry.Batch{}, &expiry.BatchError{Rows: ids, Err: err}
	}
	return expiry.Batch{}, fmt.Errorf("expirytest: sweep: %w", err)
}

// due returns the rows of a batch, longest overdue first.
func (s *Store) due(now time.Time, req expiry.Request) []expiry.Row {
	rows := slices.DeleteFunc(slices.Clone(s.cfg.Active()), func(r expiry.Row) bool {
		return r.Deadline.After(now) || slices.Contains(req.Skip, r.ID)
	})
	slices.SortFunc(rows, func(a, b expiry.Row) int {
		return cmp.Or(a.Deadline.Compare(b.Deadline), cmp.Compare(a.ID, b.ID))
	})
	return rows[:min(len(rows), req.Limit)]
}

// expire calls the callbacks; a panic of theirs is an error.
func (s *Store) expire(ctx context.Context, tx pgx.Tx, rows []expiry.Row) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("expirytest: panic: %v", p)
		}
	}()
	for _, row := range rows {
		if err := s.cfg.Expire(ctx, tx, row); err != nil {
			return err
		}
	}
	if s.cfg.Emit == nil {
		return nil
	}
	return s.cfg.Emit(ctx, tx, rows)
}

// NextDue implements expiry.Store.
func (s *Store) NextDue(ctx context.Context, skip []string) (due time.Duration, ok bool, err error) {
	opts := txretry.Options{Name: "expiry.next", ReadOnly: true}
	err = s.transactor.DoWith(ctx, opts, func(context.Context, pgx.Tx) error {
		due, ok = 0, false
		for _, row := range s.cfg.Active() {
			left := time.Until(row.Deadline)
			if !slices.Contains(skip, row.ID) && (!ok || left < due) {
				due, ok = left, true
			}
		}
		return nil
	})
	if err != nil {
		return 0, false, fmt.Errorf("expirytest: %w", err)
	}
	return due, ok, nil
}
