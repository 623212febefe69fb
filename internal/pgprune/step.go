package pgprune

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
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

// step is one statement of a pass, repeated until it deletes fewer rows than its limit.
type step struct {
	pool      *pgxpool.Pool
	table     string
	statement Statement
	limit     int
	done      bool
}

// do runs the statement once and returns how many rows it deleted. Its error is errTaken where
// another process has the lock.
func (s *step) do(ctx context.Context) (int, error) {
	n, err := s.transaction(ctx)
	if tookTooLong(err) && s.limit > fewRows {
		s.limit = fewRows
		n, err = s.transaction(ctx)
	}
	if err != nil {
		return 0, err
	}
	s.done = n < s.limit
	return n, nil
}

// transaction takes two round trips: DELETE and COMMIT share one, so that no lock on a row outlives
// a connection that falls silent.
func (s *step) transaction(ctx context.Context) (n int, err error) {
	err = pgcall.Within(ctx, s.pool, stepTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		locked, err := s.lock(ctx, conn)
		if err != nil {
			return err
		}
		if !locked {
			return errors.Join(errTaken, rollback(ctx, conn))
		}
		n, err = s.delete(ctx, conn)
		return err
	})
	return n, err
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

func (s *step) delete(ctx context.Context, conn *pgxpool.Conn) (n int, err error) {
	queue := &pgx.Batch{}
	queue.Queue(s.statement.DeleteSQL(), s.statement.args(s.limit)...).Exec(func(tag pgconn.CommandTag) error {
		n = int(tag.RowsAffected())
		return nil
	})
	queue.Queue(`COMMIT`)
	if err := conn.SendBatch(ctx, queue).Close(); err != nil {
		return 0, errors.Join(err, rollback(ctx, conn))
	}
	return n, nil
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
