package txretry

import (
	"context"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/internal/session"
)

// transaction is the state that the handle given to fn and the nested handles
// below it share during one attempt.
type transaction struct {
	session session.Session
	done    atomic.Bool // fn has returned: every handle is stale
	root    handle

	// What happens with and after COMMIT. A savepoint remembers how long both
	// lists were, whichever handle they were filled through: what the server
	// executes while a savepoint is open belongs to that savepoint.
	last       []session.Statement
	hooks      []func()
	savepoints []savepoint // open ones, outermost first
	savepointN int         // number of the last one

	rows    pgx.Rows // of the last Query: its error shows only later
	failure error    // what made the server abort the transaction
	broken  error    // a savepoint whose end did not reach the server
}

// handle is the pgx.Tx that fn works with: the outer one (id 0) or that of a
// savepoint.
type handle struct {
	t  *transaction
	id int
}

func newTransaction(s session.Session) *transaction {
	t := &transaction{session: s}
	t.root.t = t
	return t
}

// close makes every handle stale.
func (t *transaction) close() {
	t.settle()
	t.done.Store(true)
}

// record remembers the first error that aborted the transaction, for callers
// of fn who lose it.
func (t *transaction) record(err error) error {
	if err != nil && t.failure == nil && !t.done.Load() {
		if state := t.session.State(); state == session.Failed || state == session.Lost {
			t.failure = err
		}
	}
	return err
}

// settle records the error of the last Query, which is not known when Query
// returns.
func (t *transaction) settle() {
	if t.rows != nil {
		_ = t.record(t.rows.Err())
		t.rows = nil
	}
}

// tx returns what runs the next statement: on a stale handle a closed pgx.Tx,
// all of whose methods answer pgx.ErrTxClosed.
func (h *handle) tx() pgx.Tx {
	if h.closed() {
		var b pgx.Batch
		b.BeginTx(pgx.TxOptions{})
		return pgx.FailedBatchResults(&b, pgx.ErrTxClosed).Tx()
	}
	h.t.settle()
	return h.t.session.Tx()
}

func (h *handle) closed() bool {
	return h.t.done.Load() || (h.id != 0 && h.t.savepointIndex(h.id) < 0)
}

// Statement lets txretrytest run what stands for a statement on the fake below
// a handle.
func (h *handle) Statement(run func(s session.Session) error) error {
	if h.closed() {
		return pgx.ErrTxClosed
	}
	h.t.settle()
	return h.t.record(run(h.t.session))
}

func (h *handle) AfterCommit(fn func()) bool {
	if h.closed() {
		return false
	}
	if fn != nil {
		h.t.hooks = append(h.t.hooks, fn)
	}
	return true
}

func (h *handle) AtCommit(sql string, args ...any) bool {
	if h.closed() {
		return false
	}
	h.t.last = append(h.t.last, session.Statement{SQL: sql, Args: args})
	return true
}

func (h *handle) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	tag, err := h.tx().Exec(ctx, sql, args...)
	return tag, h.t.record(err)
}

func (h *handle) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := h.tx().Query(ctx, sql, args...)
	if !h.closed() {
		h.t.rows = rows
	}
	return rows, h.t.record(err)
}

func (h *handle) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return &row{h.tx().QueryRow(ctx, sql, args...), h.t}
}

func (h *handle) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return &batchResults{h.tx().SendBatch(ctx, b), h.t}
}

func (h *handle) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	n, err := h.tx().CopyFrom(ctx, table, columns, src)
	return n, h.t.record(err)
}

func (h *handle) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	sd, err := h.tx().Prepare(ctx, name, sql)
	return sd, h.t.record(err)
}

func (h *handle) LargeObjects() pgx.LargeObjects { return h.tx().LargeObjects() }

// Conn returns nil once the handle is stale: the connection is another's then.
func (h *handle) Conn() *pgx.Conn { return h.tx().Conn() }

// row records the error of a QueryRow.
type row struct {
	pgx.Row
	t *transaction
}

func (r *row) Scan(dest ...any) error { return r.t.record(r.Row.Scan(dest...)) }

// batchResults records the error of a batch.
type batchResults struct {
	pgx.BatchResults
	t *transaction
}

func (b *batchResults) Close() error { return b.t.record(b.BatchResults.Close()) }
