package txretrysql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// bridge is a pgx.Tx whose statements run in a *sql.Tx.
type bridge struct {
	tx       *sql.Tx
	patience time.Duration // with a statement; 0: without end
	s        *session      // nil: nobody looks at the connection
}

// bounded ends ctx when the server was silent for as long as patience. The end of the wait is answered.
func (b *bridge) bounded(ctx context.Context) (_ context.Context, cancel context.CancelFunc, answered func(error) error) {
	ctx, cancel = context.WithCancel(ctx)
	if b.patience == 0 {
		return ctx, cancel, b.answer
	}
	timer := time.AfterFunc(b.patience, cancel)
	return ctx, cancel, func(err error) error {
		if !timer.Stop() && err != nil {
			err = fmt.Errorf("%w: %w", driver.ErrSilent, err)
		}
		return b.answer(err)
	}
}

// answer notes what an error tells of the transaction.
func (b *bridge) answer(err error) error {
	if b.s == nil {
		return answerOf(err, false)
	}
	return b.s.note(err)
}

func (b *bridge) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	args, err := plainArgs(args)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	ctx, cancel, answered := b.bounded(ctx)
	defer cancel()
	result, err := b.tx.ExecContext(ctx, query, args...)
	if err = answered(err); err != nil {
		return pgconn.CommandTag{}, err
	}
	n, err := result.RowsAffected()
	if err != nil { // a driver that does not count
		return pgconn.CommandTag{}, nil
	}
	return pgconn.NewCommandTag("EXECUTE " + strconv.FormatInt(n, 10)), nil
}

func (b *bridge) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	args, err := plainArgs(args)
	if err != nil {
		return &rows{err: err}, err
	}
	ctx, cancel, answered := b.bounded(ctx)
	found, err := b.tx.QueryContext(ctx, query, args...)
	if err = answered(err); err != nil {
		cancel()
		return &rows{err: err}, err
	}
	return &rows{b: b, rows: found, cancel: cancel}, nil
}

func (b *bridge) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	found, _ := b.Query(ctx, query, args...) // its error is in the rows
	return row{found}
}

// SendBatch runs the statements one after the other, each when its result is asked for.
func (b *bridge) SendBatch(ctx context.Context, queue *pgx.Batch) pgx.BatchResults {
	return &results{ctx: ctx, b: b, left: queue.QueuedQueries}
}

func (b *bridge) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, errNoCopy
}

func (b *bridge) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	return nil, errNoPrepare
}

// LargeObjects returns those of a transaction that refuses every call.
func (b *bridge) LargeObjects() pgx.LargeObjects { return refusing(errNoLargeObjects).LargeObjects() }

// Conn returns the connection below database/sql where the driver is pgx's, else nil.
func (b *bridge) Conn() *pgx.Conn {
	if b.s == nil {
		return nil
	}
	conn, _ := b.s.below()
	return conn
}

var (
	errNoCopy         = fmt.Errorf("txretrysql: COPY over database/sql: %w", errors.ErrUnsupported)
	errNoPrepare      = fmt.Errorf("txretrysql: Prepare on the handle, use the *sql.Tx: %w", errors.ErrUnsupported)
	errNoLargeObjects = fmt.Errorf("txretrysql: large objects over database/sql: %w", errors.ErrUnsupported)
)

func refusing(err error) pgx.Tx {
	var batch pgx.Batch
	batch.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(&batch, err).Tx()
}
