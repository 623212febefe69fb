package txretry

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// connTx runs the statements of the transaction that a connection is in. The
// session begins and ends transactions and savepoints, so those methods of pgx.Tx
// are not called here.
type connTx struct{ guard }

func (t *connTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	t.expect(t.patience)
	tag, err := t.conn.Exec(ctx, sql, args...)
	return tag, t.answered(ctx, err)
}

func (t *connTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	t.expect(t.patience)
	rows, err := t.conn.Query(ctx, sql, args...)
	if err != nil {
		err = t.answered(ctx, err)
	}
	return &guardedRows{rows, ctx, &t.guard, err}, err
}

func (t *connTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	t.expect(t.patience)
	return &guardedRow{t.conn.QueryRow(ctx, sql, args...), ctx, &t.guard}
}

func (t *connTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	t.expect(t.patience)
	return &guardedResults{t.conn.SendBatch(ctx, b), ctx, &t.guard}
}

func (t *connTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if t.patience == 0 {
		return t.conn.CopyFrom(ctx, table, columns, src)
	}
	watched := watchCopy(&t.guard, src)
	n, err := t.conn.CopyFrom(ctx, table, columns, watched)
	watched.stop()
	return n, t.answered(ctx, err)
}

func (t *connTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	t.expect(t.patience)
	sd, err := t.conn.Prepare(ctx, name, sql)
	return sd, t.answered(ctx, err)
}

func (t *connTx) Conn() *pgx.Conn { return t.conn }

// LargeObjects needs a transaction of pgx's own making. The statement that is
// to begin it does nothing, at the price of a round trip.
func (t *connTx) LargeObjects() pgx.LargeObjects {
	t.expect(t.patience)
	tx, err := t.conn.BeginTx(context.Background(), pgx.TxOptions{BeginQuery: "select"})
	if t.answered(context.Background(), err) != nil {
		tx = closedTx()
	}
	return tx.LargeObjects()
}

func (t *connTx) Begin(context.Context) (pgx.Tx, error) { return nil, ErrManaged }
func (t *connTx) Commit(context.Context) error          { return ErrManaged }
func (t *connTx) Rollback(context.Context) error        { return ErrManaged }

// closedTx returns a pgx.Tx all of whose methods answer pgx.ErrTxClosed.
func closedTx() pgx.Tx {
	var b pgx.Batch
	b.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(&b, pgx.ErrTxClosed).Tx()
}
