package expirypgx

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
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
	ids   []string // of the claimed rows
	batch expiry.Batch
	own   error // Emit's or errNotChanged, on a connection that still works
}

func (s *Store) attempt(ctx context.Context, tx pgx.Tx, req expiry.Request, a *attempt) error {
	rows, lag, err := s.claim(ctx, tx, req)
	if err != nil || len(rows) == 0 {
		return err
	}
	for _, row := range rows {
		a.ids = append(a.ids, row.ID)
	}
	tag, err := tx.Exec(ctx, s.sql.expire, array(a.ids))
	if err != nil {
		return err
	}
	a.batch = expiry.Batch{Claimed: len(rows), Expired: len(rows), Lag: lag}
	if n := tag.RowsAffected(); n != int64(len(rows)) {
		a.own = fmt.Errorf("%w: %d rows locked, %d changed", errNotChanged, len(rows), n)
		return a.own
	}
	if s.cfg.Emit == nil {
		return nil
	}
	if err := emit(ctx, tx, rows, s.cfg.Emit); err != nil {
		if !tx.Conn().IsClosed() {
			a.own = err
		}
		return err
	}
	return nil
}

// errNotChanged is the failure of a batch whose rows are locked, active and due
// and yet do not all change, once each: left alone they would come back in every
// batch, or expire unannounced.
var errNotChanged = errors.New("expirypgx: a trigger keeps rows from changing, or Config.ID is not unique")

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

// emit turns a panic of the callback into an error.
func emit(ctx context.Context, tx pgx.Tx, rows []expiry.Row, fn func(context.Context, pgx.Tx, []expiry.Row) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("expirypgx: panic in Emit: %v", p)
		}
	}()
	return fn(ctx, tx, rows)
}

// blames reports whether one of the claimed rows may have caused err: any error
// of Emit's own or of its statements, bad data, a constraint, a trigger, but not
// what would hit any row.
func (a attempt) blames(err error) bool {
	var locked *txretry.LockTimeoutError
	var unknown *txretry.CommitUnknownError
	if len(a.ids) == 0 || errors.As(err, &locked) || errors.As(err, &unknown) {
		return false
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return a.own != nil && errors.Is(err, a.own)
	}
	switch pg.Code {
	case pgStatementTimeout: // fewer rows may be quick enough; one is no worse than another
		return len(a.ids) > 1
	case pgTransactionFailed: // Emit went on after a statement that failed
		return true
	}
	return !slices.Contains(noRowsFault, pg.Code[:min(2, len(pg.Code))])
}

const (
	pgStatementTimeout  = "57014"
	pgTransactionFailed = "25P02"
)

// noRowsFault are the SQLSTATE classes of connections, features, the state of
// the transaction, authorization, catalogs, conflicts, schema and permissions,
// resources, locks, shutdown and the server's own faults. Everything else,
// states that triggers make up included, may come from a row: to suspect one
// wrongly delays it, to overlook it stops all the others.
var noRowsFault = []string{"08", "0A", "25", "26", "28", "34", "3B", "3D", "3F", "40", "42", "53", "55", "57", "58", "F0", "XX"}

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
