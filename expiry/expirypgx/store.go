package expirypgx

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/txretry"
)

// Store is an expiry.Store on a Postgres table. Make it with NewStore. It is
// safe for concurrent use.
type Store struct {
	transactor txretry.Transactor
	pool       *pgxpool.Pool
	cfg        Config
	sql        statements
}

// NewStore returns a Store. Batches run through t, which retries conflicts; pool
// serves the look for the next due time and Check. Nothing is asked of the
// server yet.
func NewStore(t txretry.Transactor, pool *pgxpool.Pool, cfg Config) (*Store, error) {
	var errs []error
	if t == nil {
		errs = append(errs, errors.New("expirypgx: transactor is nil"))
	}
	if pool == nil {
		errs = append(errs, errors.New("expirypgx: pool is nil"))
	}
	cfg = cfg.withDefaults()
	if err := errors.Join(append(errs, cfg.validate())...); err != nil {
		return nil, err
	}
	sql, err := newStatements(cfg)
	if err != nil {
		return nil, fmt.Errorf("expirypgx: %w", err)
	}
	return &Store{transactor: t, pool: pool, cfg: cfg, sql: sql}, nil
}

// SweepBatch implements expiry.Store.
func (s *Store) SweepBatch(ctx context.Context, req expiry.Request) (expiry.Batch, error) {
	if req.Limit < 1 {
		return expiry.Batch{}, fmt.Errorf("expirypgx: Request.Limit is %d, must be positive", req.Limit)
	}
	var a attempt
	opts := txretry.Options{Name: "expiry.sweep", Isolation: s.cfg.Isolation}
	err := s.transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		a = attempt{} // of an earlier attempt nothing is left
		return s.attempt(ctx, tx, req, &a)
	})
	switch {
	case err == nil:
		return a.batch, nil
	case ctx.Err() == nil && a.blames(err):
		return expiry.Batch{}, &expiry.BatchError{Rows: a.ids, Err: err}
	}
	return expiry.Batch{}, fmt.Errorf("expirypgx: sweep: %w", err)
}

// attempt is what is known of the attempt that ended the transaction.
type attempt struct {
	ids     []string // of the claimed rows
	batch   expiry.Batch
	emitErr error // Emit's, on a connection that still works
}

func (s *Store) attempt(ctx context.Context, tx pgx.Tx, req expiry.Request, a *attempt) error {
	rows, lag, err := s.claim(ctx, tx, req)
	if err != nil || len(rows) == 0 {
		return err
	}
	for _, row := range rows {
		a.ids = append(a.ids, row.ID)
	}
	expired, err := s.expire(ctx, tx, rows, a.ids)
	if err != nil {
		return err
	}
	a.batch = expiry.Batch{Claimed: len(rows), Expired: len(expired), Lag: lag}
	if s.cfg.Emit == nil || len(expired) == 0 {
		return nil
	}
	if err := emit(ctx, tx, expired, s.cfg.Emit); err != nil {
		if !tx.Conn().IsClosed() {
			a.emitErr = err
		}
		return err
	}
	return nil
}

// claim locks the rows that are due, longest overdue first.
func (s *Store) claim(ctx context.Context, tx pgx.Tx, req expiry.Request) ([]expiry.Row, time.Duration, error) {
	result, err := tx.Query(ctx, s.sql.claim, req.Limit, array(req.Skip))
	if err != nil {
		return nil, 0, err
	}
	defer result.Close()
	var rows []expiry.Row
	var lag time.Duration
	for result.Next() {
		row, now, err := s.scan(result)
		if err != nil {
			return nil, 0, err
		}
		if !row.Deadline.IsZero() {
			lag = max(lag, now.Sub(row.Deadline))
		}
		rows = append(rows, row)
	}
	return rows, lag, result.Err()
}

// scan reads one claimed row. A deadline of -infinity becomes the zero time.
func (s *Store) scan(result pgx.Rows) (row expiry.Row, now time.Time, err error) {
	var deadline pgtype.Timestamptz
	values := make([]*string, len(s.cfg.Columns))
	dest := []any{&row.ID, &deadline, &now}
	for i := range values {
		dest = append(dest, &values[i])
	}
	if err := result.Scan(dest...); err != nil {
		return row, now, err
	}
	if deadline.InfinityModifier == pgtype.Finite {
		row.Deadline = deadline.Time
	}
	if len(values) > 0 {
		row.Values = make(map[string]string, len(values))
	}
	for i, name := range s.cfg.Columns {
		if values[i] != nil {
			row.Values[name] = *values[i]
		}
	}
	return row, now, nil
}

// expire changes the state and returns the rows for which it did.
func (s *Store) expire(ctx context.Context, tx pgx.Tx, rows []expiry.Row, ids []string) ([]expiry.Row, error) {
	result, err := tx.Query(ctx, s.sql.expire, array(ids))
	if err != nil {
		return nil, err
	}
	changed, err := pgx.CollectRows(result, pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	if len(changed) == len(rows) {
		return rows, nil
	}
	done := make(map[string]bool, len(changed))
	for _, id := range changed {
		done[id] = true
	}
	var expired []expiry.Row
	for _, row := range rows {
		if done[row.ID] {
			expired = append(expired, row)
		}
	}
	return expired, nil
}

// emit turns a panic of the callback into an error.
func emit(ctx context.Context, tx pgx.Tx, rows []expiry.Row, fn func(context.Context, pgx.Tx, []expiry.Row) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("expirypgx: panic in Emit: %v", p)
		}
	}()
	return fn(ctx, tx, rows)
}

// blames reports whether one of the claimed rows may have caused err: bad data,
// a constraint, an exception raised by a trigger, or an error of Emit's own. The
// rest (connection, locks, schema, permissions) would hit any row.
func (a attempt) blames(err error) bool {
	var locked *txretry.LockTimeoutError
	var unknown *txretry.CommitUnknownError
	if len(a.ids) == 0 || errors.As(err, &locked) || errors.As(err, &unknown) {
		return false
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return a.emitErr != nil && errors.Is(err, a.emitErr)
	}
	switch pg.Code[:min(2, len(pg.Code))] {
	case "22", "23", "44", "P0":
		return true
	}
	return false
}

// farAway is when a deadline is too far off to plan for.
const farAway = 365 * 24 * time.Hour

// NextDue implements expiry.Store.
func (s *Store) NextDue(ctx context.Context, skip []string) (time.Duration, bool, error) {
	var seconds *float64
	if err := s.pool.QueryRow(ctx, s.sql.nextDue, array(skip)).Scan(&seconds); err != nil {
		return 0, false, fmt.Errorf("expirypgx: %w", err)
	}
	switch {
	case seconds == nil || math.IsNaN(*seconds) || *seconds > farAway.Seconds():
		return 0, false, nil
	case *seconds <= 0:
		return 0, true, nil
	}
	return time.Duration(math.Ceil(*seconds*1e6)) * time.Microsecond, true, nil
}
