package txretry

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// connTx runs the statements of the transaction that a connection is in. What
// begins and ends transactions is the session's; nobody asks for it here.
type connTx struct{ conn *pgx.Conn }

func (t *connTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return t.conn.Exec(ctx, sql, args...)
}

func (t *connTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return t.conn.Query(ctx, sql, args...)
}

func (t *connTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return t.conn.QueryRow(ctx, sql, args...)
}

func (t *connTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return t.conn.SendBatch(ctx, b)
}

func (t *connTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	return t.conn.CopyFrom(ctx, table, columns, src)
}

func (t *connTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	return t.conn.Prepare(ctx, name, sql)
}

func (t *connTx) Conn() *pgx.Conn { return t.conn }

// LargeObjects needs a transaction of pgx's own making. The statement that is
// to begin it does nothing, at the price of a round trip.
func (t *connTx) LargeObjects() pgx.LargeObjects {
	tx, err := t.conn.BeginTx(context.Background(), pgx.TxOptions{BeginQuery: "select"})
	if err != nil {
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
