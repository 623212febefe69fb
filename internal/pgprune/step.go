package pgprune

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
)

const (
	// maxRows is how many rows one step deletes: enough for tens of thousands a second, few enough
	// that a step takes some milliseconds.
	maxRows = 1000
	// fewRows is how many a step deletes when maxRows have taken too long.
	fewRows = 100
	// stepTimeout bounds one step.
	stepTimeout = 5 * time.Second
)

const (
	// beginSQL works whatever the database's default: in a stricter transaction a row that another
	// process has just changed is an error.
	beginSQL = `BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`
	// boundSQL makes the server end a step whose connection fell silent, and with it the lock.
	boundSQL = `SELECT set_config('idle_in_transaction_session_timeout', $1, true), set_config('statement_timeout', $1, true)`
	lockSQL  = `SELECT pg_try_advisory_xact_lock(hashtextextended('holdfast prune ' || $1::text::regclass::oid, 0))`
)

// step is one statement of a pass, repeated until it chooses fewer rows than its limit.
type step struct {
	pool      *pgxpool.Pool
	table     string
	statement Statement
	limit     int
	most      int // the limit while all goes well
	skip      int // rows at the beginning that cannot be deleted
	refused   int // those of this pass
	why       error
	done      bool
}

// do runs the statement once and returns how many rows it deleted. Its error is errTaken where
// another process has the lock. Where the server refuses the rows, the next call tries fewer; one row that is refused alone is
// left out from then on.
func (s *step) do(ctx context.Context) (int, error) {
	chosen, gone, err := s.transaction(ctx)
	if tookTooLong(err) && s.limit > fewRows {
		s.limit, s.most = fewRows, fewRows
		chosen, gone, err = s.transaction(ctx)
	}
	switch {
	case sqlstate.Refused(err) && s.limit > 1:
		s.limit /= 10
		return 0, nil
	case sqlstate.Refused(err):
		return 0, s.leave(ctx, 1, err)
	case err != nil:
		return 0, err
	case gone < chosen:
		if err := s.leave(ctx, chosen-gone, pgcall.Ignored(s.statement.Table, "the DELETE")); err != nil {
			return gone, err
		}
	}
	s.done = chosen < s.limit
	s.limit = min(s.limit*10, s.most)
	return gone, nil
}

// leave leaves out the next n rows, and notes why for the first one. It returns why if there is no such row: then no row is at
// fault.
func (s *step) leave(ctx context.Context, n int, why error) error {
	if s.why == nil {
		id, err := s.name(ctx)
		if err != nil {
			return why
		}
		s.why = fmt.Errorf("row %s of table %s cannot be deleted: %w", id, s.statement.Table, why)
	}
	s.skip += n
	s.refused += n
	return nil
}

// name returns the ID of the next row.
func (s *step) name(ctx context.Context) (id string, err error) {
	err = pgcall.Within(ctx, s.pool, stepTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, s.statement.nameSQL(), s.statement.args(s.skip)...).Scan(&id)
	})
	return id, err
}

// err returns why rows could not be deleted.
func (s *step) err() error {
	if s.refused > 1 {
		return fmt.Errorf("%w (and %d more rows)", s.why, s.refused-1)
	}
	return s.why
}

// transaction takes two round trips: DELETE and COMMIT share one, so that no lock on a row outlives
// a connection that falls silent.
func (s *step) transaction(ctx context.Context) (chosen, gone int, err error) {
	err = pgcall.Within(ctx, s.pool, stepTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		locked, err := s.lock(ctx, conn)
		if err != nil {
			return err
		}
		if !locked {
			return errors.Join(errTaken, rollback(ctx, conn))
		}
		chosen, gone, err = s.delete(ctx, conn)
		return err
	})
	return chosen, gone, err
}

func (s *step) lock(ctx context.Context, conn *pgxpool.Conn) (locked bool, err error) {
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(boundSQL, stepTimeout.String())
	queue.Queue(lockSQL, s.table).QueryRow(func(row pgx.Row) error { return row.Scan(&locked) })
	if err := conn.SendBatch(ctx, queue).Close(); err != nil {
		return false, errors.Join(err, rollback(ctx, conn))
	}
	return locked, nil
}

func (s *step) delete(ctx context.Context, conn *pgxpool.Conn) (chosen, gone int, err error) {
	queue := &pgx.Batch{}
	queue.Queue(s.statement.DeleteSQL(), s.statement.args(s.limit, s.skip)...).QueryRow(func(row pgx.Row) error { return row.Scan(&chosen, &gone) })
	queue.Queue(`COMMIT`)
	if err := conn.SendBatch(ctx, queue).Close(); err != nil {
		return 0, 0, errors.Join(err, rollback(ctx, conn))
	}
	return chosen, gone, nil
}

// rollback does nothing where the connection was closed: the server ends the transaction then.
func rollback(ctx context.Context, conn *pgxpool.Conn) error {
	if conn.Conn().IsClosed() {
		return nil
	}
	_, err := conn.Exec(ctx, `ROLLBACK`)
	return err
}

// tookTooLong says whether the step met its bound, on the way or at the server.
func tookTooLong(err error) bool {
	const queryCanceled = "57014"
	answer, ok := errors.AsType[*pgconn.PgError](err)
	return errors.Is(err, pgcall.ErrSilent) || ok && answer.Code == queryCanceled
}
