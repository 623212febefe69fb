package txretrytest

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

var errNoSQL = errors.New("txretrytest: a fake transaction runs no SQL")

// maxQuote bounds how much of a statement an error quotes.
const maxQuote = 200

// fakeTx refuses statements. Begin, Commit and Rollback are the handle's above
// it and never come here.
type fakeTx struct {
	pgx.Tx
	s *fakeSession
}

// refuse aborts the transaction: the mistake comes out of Do even if the caller
// ignores this error.
func (s *fakeSession) refuse(sql string) error {
	if s.state == driver.Lost {
		return errClosed
	}
	if len(sql) > maxQuote {
		sql = sql[:maxQuote] + "…"
	}
	return s.fail(fmt.Errorf("%w: %q", errNoSQL, sql))
}

func (t fakeTx) Exec(_ context.Context, sql string, _ ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, t.s.refuse(sql)
}

func (t fakeTx) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	return t.failed(sql).Query()
}

func (t fakeTx) QueryRow(_ context.Context, sql string, _ ...any) pgx.Row {
	return t.failed(sql).QueryRow()
}

func (t fakeTx) failed(sql string) pgx.BatchResults {
	return pgx.FailedBatchResults(&pgx.Batch{}, t.s.refuse(sql))
}

func (t fakeTx) SendBatch(_ context.Context, b *pgx.Batch) pgx.BatchResults {
	sql := "(empty batch)"
	if b.Len() > 0 {
		sql = b.QueuedQueries[0].SQL
	}
	return pgx.FailedBatchResults(b, t.s.refuse(sql))
}

func (t fakeTx) CopyFrom(_ context.Context, table pgx.Identifier, _ []string, _ pgx.CopyFromSource) (int64, error) {
	return 0, t.s.refuse("copy " + table.Sanitize() + " from stdin")
}

func (t fakeTx) Prepare(_ context.Context, _, sql string) (*pgconn.StatementDescription, error) {
	return nil, t.s.refuse(sql)
}

func (fakeTx) LargeObjects() pgx.LargeObjects { return pgx.LargeObjects{} }

func (fakeTx) Conn() *pgx.Conn { return nil }
