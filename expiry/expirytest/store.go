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
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/internal/blame"
	"github.com/holdfast-go/holdfast/txretry"
)

// Config says where the rows are.
type Config struct {
	// Active returns the rows that can expire, due or not, in any order. It is
	// called inside a transaction, so it sees what is committed. A row with the zero
	// deadline stands for one without any: it never expires. Required.
	Active func() []expiry.Row

	// Expire changes the state of one row through txretrytest.Effect. Required.
	Expire func(ctx context.Context, tx pgx.Tx, row expiry.Row) error

	// Emit and Each are called in the same transaction, as those of
	// expirypgx.Config are: Emit with all rows of the batch, longest overdue first,
	// Each with one after the other. At most one of them is set. Without either
	// only the state changes.
	Emit func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error
	Each func(ctx context.Context, tx pgx.Tx, row expiry.Row) error

	// Now is the clock that decides, in the place of a database's. Nil means
	// time.Now, which is the bubble's under testing/synctest.
	Now func() time.Time
}

// Store is an driver.Store in memory. Make it with NewStore. It is safe for
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
	if cfg.Emit != nil && cfg.Each != nil {
		errs = append(errs, errors.New("expirytest: Config.Emit and Config.Each are both set"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Store{transactor: t, cfg: cfg}, nil
}

// SweepBatch implements driver.Store.
func (s *Store) SweepBatch(ctx context.Context, req driver.Request) (driver.Batch, error) {
	if req.Limit < 1 {
		return driver.Batch{}, fmt.Errorf("expirytest: Request.Limit is %d, must be positive", req.Limit)
	}
	var batch driver.Batch
	var a blame.Attempt
	opts := txretry.Options{Name: "expiry.sweep"}
	err := s.transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		now := s.cfg.Now()
		rows := s.due(now, req)
		batch, a = driver.Batch{Claimed: len(rows), Expired: len(rows)}, blame.Attempt{}
		if len(rows) == 0 {
			return nil
		}
		batch.Lag, batch.Last = now.Sub(rows[0].Deadline), cursor(rows[len(rows)-1])
		a.Last = batch.Last
		for _, row := range rows {
			a.Rows = append(a.Rows, row.ID)
		}
		if err := s.expire(ctx, tx, rows); err != nil {
			a.Own = fmt.Errorf("expirytest: %w", err) // which can be compared, whatever it wraps
		}
		return a.Own
	})
	if err == nil {
		return batch, nil
	}
	var unknown *txretry.CommitUnknownError
	if blamed := a.Failure(ctx, err, errors.As(err, &unknown)); blamed != nil {
		return driver.Batch{}, blamed
	}
	return driver.Batch{}, fmt.Errorf("expirytest: sweep: %w", err)
}

// due returns the rows of a batch, longest overdue first.
func (s *Store) due(now time.Time, req driver.Request) []expiry.Row {
	rows := slices.DeleteFunc(slices.Clone(s.cfg.Active()), func(r expiry.Row) bool {
		return r.Deadline.IsZero() || r.Deadline.After(now) || slices.Contains(req.Skip, r.ID) ||
			len(req.Only) > 0 && !slices.Contains(req.Only, r.ID) ||
			len(req.Only) == 0 && req.After.ID != "" && compare(cursor(r), req.After) <= 0
	})
	slices.SortFunc(rows, func(a, b expiry.Row) int { return compare(cursor(a), cursor(b)) })
	return rows[:min(len(rows), req.Limit)]
}

func cursor(r expiry.Row) driver.Cursor { return driver.Cursor{Deadline: r.Deadline, ID: r.ID} }

func compare(a, b driver.Cursor) int {
	return cmp.Or(a.Deadline.Compare(b.Deadline), cmp.Compare(a.ID, b.ID))
}

// expire calls the callbacks; a panic of theirs is an error.
func (s *Store) expire(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
	for _, row := range rows {
		if err := guarded(func() error { return s.cfg.Expire(ctx, tx, row) }); err != nil {
			return fmt.Errorf("expire: %w", err)
		}
	}
	if s.cfg.Emit != nil {
		return guarded(func() error { return s.cfg.Emit(ctx, tx, rows) })
	}
	for _, row := range rows {
		if s.cfg.Each == nil {
			break
		}
		if err := guarded(func() error { return s.cfg.Each(ctx, tx, row) }); err != nil {
			return &expiry.RowError{ID: row.ID, Err: err}
		}
	}
	return nil
}

func guarded(call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return call()
}

// Look implements driver.Store.
func (s *Store) Look(ctx context.Context, skip []string) (driver.Outlook, error) {
	var o driver.Outlook
	opts := txretry.Options{Name: "expiry.look", ReadOnly: true}
	err := s.transactor.DoWith(ctx, opts, func(context.Context, pgx.Tx) error {
		o = driver.Outlook{Now: s.cfg.Now()}
		for _, row := range s.cfg.Active() {
			if row.Deadline.IsZero() {
				o.Undated = min(o.Undated+1, driver.MaxOverdue)
				continue
			}
			left := row.Deadline.Sub(o.Now)
			if left <= 0 {
				o.Overdue = min(o.Overdue+1, driver.MaxOverdue)
				o.Lag = max(o.Lag, -left)
			}
			if !slices.Contains(skip, row.ID) && (!o.Pending || left < o.Due) {
				o.Due, o.Pending = left, true
			}
		}
		return nil
	})
	if err != nil {
		return driver.Outlook{}, fmt.Errorf("expirytest: %w", err)
	}
	return o, nil
}

// Check finds active rows without a deadline, for which a sweeper does not start.
func (s *Store) Check(ctx context.Context) ([]expiry.Finding, error) {
	o, err := s.Look(ctx, nil)
	if err != nil || o.Undated == 0 {
		return nil, err
	}
	return []expiry.Finding{{
		Component: "expirytest", Problem: fmt.Sprintf("%d active rows have no deadline and never expire", o.Undated),
		Mend: "give them one, or leave them out of Config.Active",
	}}, nil
}
