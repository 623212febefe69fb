// Package expirytest keeps rows that expire in memory, for unit tests and demonstrations without a
// database. Its [Store] replaces the Store of expirypgx, in transactions of txretrytest. [Prove]
// runs your sweep on a real Postgres, once for each point at which it can be interrupted.
package expirytest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/expiry/internal/blame"
	"github.com/holdfast-go/holdfast/expiry/internal/wakeups"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Config has the functions of the rows. The zero value keeps the rows in the Store itself; Put writes them.
type Config struct {
	// Active returns the rows that can expire, due or not, in any order. It is called in a transaction, so it sees
	// committed rows. A zero deadline means no deadline: the row never expires. Set it together with Expire. Default:
	// the rows that were Put with the state "held".
	Active func() []expiry.Row

	// Expire changes the state of one row by txretrytest.Effect. Default: the row's state becomes "expired".
	Expire func(ctx context.Context, tx pgx.Tx, row expiry.Row) error

	// Emit is called in the same transaction with all rows of the batch, longest overdue first, like Emit of
	// expirypgx.Config. Default: only the state changes.
	Emit func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error
}

// Store holds rows that expire in memory. Make it with New. It is safe for concurrent use as far as Config's
// functions are; it calls them only in transactions. Its clock is time.Now, in testing/synctest the bubble's clock.
//
// SweepBatch, Look, Fit and Background are for expiry.Sweeper.
type Store struct {
	transactor txretry.Transactor
	cfg        Config
	table      *table
	sweepers   wakeups.List
}

// New returns a Store whose batches run in transactions of t, a
// *txretrytest.Manager.
func New(t txretry.Transactor, cfg Config) (*Store, error) {
	var errs []error
	if t == nil {
		errs = append(errs, errors.New("expirytest: transactor is nil"))
	}
	if (cfg.Active == nil) != (cfg.Expire == nil) {
		errs = append(errs, errors.New("expirytest: set both Config.Active and Config.Expire, or neither"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	s := &Store{transactor: t, cfg: cfg, table: newTable()}
	if cfg.Active == nil {
		s.cfg.Active, s.cfg.Expire = s.table.active, s.table.expire
	}
	return s, nil
}

// Put writes a new or existing row as part of the transaction. A row with the state "held" expires at its deadline
// and then is "expired". It has no Values: if Emit reads some, set Config.Active and Config.Expire.
func (s *Store) Put(tx pgx.Tx, id string, deadline time.Time, state string) error {
	return s.table.put(tx, id, tableRow{deadline, state})
}

// Get returns the deadline and the state of a row that was Put, or false if there is
// no such row.
func (s *Store) Get(id string) (deadline time.Time, state string, ok bool) {
	row, ok := s.table.get(id)
	return row.deadline, row.state, ok
}

// Due announces that the transaction makes or changes a row that falls due at the deadline. It wakes the sweepers on
// this Store after the commit. It returns false if tx does not come from a txretry.Manager or a txretrytest.Manager.
func (s *Store) Due(tx pgx.Tx, deadline time.Time) bool {
	return txdriver.Hint(tx, func() { s.Wake(deadline) })
}

// Wake does immediately what Due does after a commit. Zero means an unknown time.
func (s *Store) Wake(deadline time.Time) { s.sweepers.Wake(deadline) }

// Background implements expiry/driver.Background.
func (s *Store) Background(ctx context.Context, wake func(at time.Time)) {
	defer s.sweepers.Add(wake)()
	wake(time.Time{}) // for rows made since the sweeper's first Look
	<-ctx.Done()
}

// SweepBatch implements expiry/driver.Store.
func (s *Store) SweepBatch(ctx context.Context, req driver.Request) (driver.Batch, error) {
	if req.Limit < 1 {
		return driver.Batch{}, fmt.Errorf("expirytest: Request.Limit is %d, must be positive", req.Limit)
	}
	var batch driver.Batch
	var a blame.Attempt
	opts := txretry.Options{Name: "expiry.sweep"}
	err := s.transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		now := time.Now()
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
			a.Own = fmt.Errorf("expirytest: %w", err) // comparable, whatever it wraps
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

// expire calls the callbacks. A panic in a callback is an error.
func (s *Store) expire(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
	for _, row := range rows {
		if err := guarded(func() error { return s.cfg.Expire(ctx, tx, row) }); err != nil {
			return fmt.Errorf("expire: %w", err)
		}
	}
	if s.cfg.Emit == nil {
		return nil
	}
	return guarded(func() error { return s.cfg.Emit(ctx, tx, rows) })
}

func guarded(call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return call()
}

// Overdue returns the active rows that have been due for at least the duration by, longest overdue first. The limit
// must be at least 1.
func (s *Store) Overdue(ctx context.Context, by time.Duration, limit int) (rows []expiry.Row, err error) {
	if by < 0 || limit < 1 {
		return nil, errors.New("expirytest: overdue: by must not be negative, and limit must be at least 1")
	}
	opts := txretry.Options{Name: "expiry.overdue", ReadOnly: true}
	err = s.transactor.DoWith(ctx, opts, func(context.Context, pgx.Tx) error {
		rows = s.due(time.Now().Add(-by), driver.Request{Limit: limit})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("expirytest: %w", err)
	}
	return rows, nil
}

// Look implements expiry/driver.Store.
func (s *Store) Look(ctx context.Context, skip []string) (driver.Outlook, error) {
	var o driver.Outlook
	opts := txretry.Options{Name: "expiry.look", ReadOnly: true}
	err := s.transactor.DoWith(ctx, opts, func(context.Context, pgx.Tx) error {
		o = driver.Outlook{Now: time.Now()}
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

// Fit implements expiry/driver.Fit. It finds active rows without a deadline.
func (s *Store) Fit(ctx context.Context) error {
	o, err := s.Look(ctx, nil)
	if err != nil || o.Undated == 0 {
		return err
	}
	return check.New("expirytest", fmt.Sprintf("%d active rows have no deadline and never expire", o.Undated),
		"set a deadline, or exclude them from Config.Active")
}

// Check returns the result of Fit.
func (s *Store) Check(ctx context.Context) error { return s.Fit(ctx) }

// table holds the rows of a Store without Config.Active.
type table struct {
	mu   sync.Mutex
	rows map[string]tableRow
}

type tableRow struct {
	deadline time.Time
	state    string
}

// The states used by the table.
const (
	held    = "held"
	expired = "expired"
)

func newTable() *table { return &table{rows: map[string]tableRow{}} }

func (t *table) put(tx pgx.Tx, id string, row tableRow) error {
	var old tableRow
	var known bool
	return txretrytest.Effect(tx, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		old, known = t.rows[id]
		t.rows[id] = row
	}, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if known {
			t.rows[id] = old
		} else {
			delete(t.rows, id)
		}
	})
}

func (t *table) get(id string) (tableRow, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	row, ok := t.rows[id]
	return row, ok
}

func (t *table) active() []expiry.Row {
	t.mu.Lock()
	defer t.mu.Unlock()
	var active []expiry.Row
	for id, row := range t.rows {
		if row.state == held {
			active = append(active, expiry.Row{ID: id, Deadline: row.deadline})
		}
	}
	return active
}

func (t *table) expire(_ context.Context, tx pgx.Tx, row expiry.Row) error {
	found, ok := t.get(row.ID)
	if !ok || found.state != held {
		return fmt.Errorf("expirytest: row %q is not held", row.ID)
	}
	return t.put(tx, row.ID, tableRow{found.deadline, expired})
}

// Prove runs a sweep and its Emit on a real database under faults, as txretrytest.Proof describes. start works like a
// process of your program: on the given pool it makes the expirypgx.Store. Each attempt is one expiry.Sweeper.Sweep.
// Proof.Reset writes the due rows: fewer than 200, so that they are one batch, and with fixed deadlines, because
// now() differs each time.
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

// sweep is the sweep of a process that has just started, without rows in quarantine. It returns an error if a row
// goes to quarantine, or if Emit swallowed an error.
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

// batches records errors of a store. It hides the store's Fit.
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
