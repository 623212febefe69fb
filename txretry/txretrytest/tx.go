package txretrytest

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/internal/session"
)

// ErrNoSQL is wrapped by the answer to every statement on a fake transaction.
var ErrNoSQL = errors.New("txretrytest: a fake transaction runs no SQL")

// maxQuote bounds how much of a statement an error quotes.
const maxQuote = 200

// fakeTx refuses statements. Begin, Commit and Rollback are the handle's above
// it and never come here.
type fakeTx struct {
	pgx.Tx
	s *fakeSession
}

// refuse aborts the transaction, as a failing statement does: the mistake comes
// out of Do even if the caller ignores this error.
func (s *fakeSession) refuse(sql string) error {
	s.state = session.Failed
	if len(sql) > maxQuote {
		sql = sql[:maxQuote] + "…"
	}
	return fmt.Errorf("%w: %q", ErrNoSQL, sql)
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

// Effect changes memory as part of a fake transaction: apply runs at once, undo
// runs if the transaction, or the savepoint open at this moment, rolls back.
// Several undos run in reverse order. Both run on the goroutine of the
// transaction, neither may use tx.
//
// It returns an error, and runs neither, if tx is not a transaction of a
// [Manager] (the error names what it is), is closed (pgx.ErrTxClosed) or read
// only, or has failed before; and if a function is nil.
func Effect(tx pgx.Tx, apply, undo func()) error {
	if tx == nil || apply == nil || undo == nil {
		return errors.New("txretrytest: Effect needs a tx, an apply and an undo function")
	}
	h, ok := tx.(interface {
		Session() (session.Session, bool)
	})
	if !ok {
		return fmt.Errorf("txretrytest: Effect needs a transaction of txretrytest.Manager, not a %T", tx)
	}
	s, open := h.Session()
	fake, ok := s.(*fakeSession)
	switch {
	case !ok:
		return fmt.Errorf("txretrytest: Effect needs a transaction of txretrytest.Manager, not a real one (%T on %T)", tx, s)
	case !open:
		return fmt.Errorf("txretrytest: Effect: %w", pgx.ErrTxClosed)
	}
	return fake.apply(apply, undo)
}
