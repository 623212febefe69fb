package txretry

import (
	"context"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// transaction is the state that the handle given to fn and the nested handles
// below it share during one attempt.
type transaction struct {
	session   driver.Session
	isolation pgx.TxIsoLevel
	readOnly  bool
	ctx       fnContext
	done      atomic.Bool // fn has returned: every handle is stale
	committed bool
	root      handle

	// What happens with COMMIT and after it, whichever handle it was registered through.
	pending     *pending // own, or that of the call whose transaction this is
	own         pending
	afterCommit []hook

	savepoints []savepoint // open ones, outermost first
	savepointN int         // number of the last one

	rows    pgx.Rows // of the last Query: its error shows only later
	failure error    // what made the server abort the transaction
	broken  error    // why it must not commit, although the server would
}

// handle is the pgx.Tx that fn works with: the outer one (id 0) or that of a
// savepoint.
type handle struct {
	t       *transaction
	id      int
	managed bool // by Do, not by fn
}

// open prepares the state of a new transaction.
func (t *transaction) open(ctx context.Context, m *Manager, s driver.Session, isolation pgx.TxIsoLevel, readOnly bool) {
	t.session, t.isolation, t.readOnly = s, isolation, readOnly
	t.ctx = fnContext{ctx, t, m.marker}
	t.pending = &t.own
	t.root = handle{t: t, managed: true}
}

// close makes every handle stale.
func (t *transaction) close() {
	t.settle()
	t.done.Store(true)
}

// record remembers the first error that aborted the transaction, in case fn does
// not return it.
func (t *transaction) record(err error) error {
	if err != nil && t.failure == nil && !t.done.Load() {
		if state := t.session.State(); state == driver.Failed || state == driver.Lost {
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

// tx returns what runs the next statement: nothing on a stale handle.
func (h *handle) tx() pgx.Tx {
	if h.closed() {
		return closedTx()
	}
	h.t.settle()
	return h.t.session.Tx()
}

func (h *handle) closed() bool {
	return h.t.done.Load() || (h.id != 0 && h.t.savepointIndex(h.id) < 0)
}

// Statement lets txretrytest run what stands for a statement on the fake below
// a handle.
func (h *handle) Statement(run func(s driver.Session) error) error {
	if h.closed() {
		return pgx.ErrTxClosed
	}
	h.t.settle()
	return h.t.record(run(h.t.session))
}

// before sends what waits for COMMIT where a statement is not plain.
func (h *handle) before(ctx context.Context, sql string, args []any) error {
	if h.closed() {
		return nil // pgx.ErrTxClosed will be the answer
	}
	h.t.settle()
	return h.t.before(ctx, func() bool { return isPlain(sql, args) })
}

// Expose lets txretrysql hand out the transaction below the handle.
func (h *handle) Expose() {
	if !h.closed() {
		h.t.settle()
		h.t.expose()
	}
}

func (h *handle) AfterCommit(fn func()) bool {
	if h.closed() {
		return false
	}
	t := h.t
	if fn == nil || t.doomed() {
		return true
	}
	t.afterCommit = append(t.afterCommit, hook{fn: fn, stretch: t.pending.stretch()})
	t.pending.unmarked++
	if t.pending.exposed {
		t.flushUnseen()
	}
	return true
}

// HintAfterCommit implements driver.Hint.
func (h *handle) HintAfterCommit(fn func()) bool {
	if h.closed() {
		return false
	}
	h.t.afterCommit = append(h.t.afterCommit, hook{fn: fn, hint: true})
	return true
}

func (h *handle) AtCommit(sql string, args ...any) bool {
	return h.AtCommitExplained(nil, sql, args...)
}

// AtCommitExplained is AtCommit for a caller that knows more about the error of COMMIT.
func (h *handle) AtCommitExplained(explain func(error) error, sql string, args ...any) bool {
	if h.closed() || h.t.pending.exposed {
		return false
	}
	if h.t.doomed() {
		return true
	}
	h.t.pending.statements = append(h.t.pending.statements, driver.Statement{SQL: sql, Args: args, Explain: explain})
	return true
}

// EffectAtCommit is AtCommit for txretrytest.
func (h *handle) EffectAtCommit(e driver.Effect) bool {
	if h.closed() {
		return false
	}
	if !h.t.doomed() {
		h.t.pending.statements = append(h.t.pending.statements, driver.Statement{Effect: &e})
	}
	return true
}

func (h *handle) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := h.before(ctx, sql, args); err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := h.tx().Exec(ctx, sql, args...)
	return tag, h.t.record(err)
}

func (h *handle) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := h.before(ctx, sql, args); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).Query()
	}
	rows, err := h.tx().Query(ctx, sql, args...)
	if !h.closed() {
		h.t.rows = rows
	}
	return rows, h.t.record(err)
}

func (h *handle) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := h.before(ctx, sql, args); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).QueryRow()
	}
	return &row{h.tx().QueryRow(ctx, sql, args...), h.t}
}

func (h *handle) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if !h.closed() {
		h.t.settle()
		if err := h.t.before(ctx, func() bool { return isPlainBatch(b) }); err != nil {
			return pgx.FailedBatchResults(b, err)
		}
	}
	return &batchResults{h.tx().SendBatch(ctx, b), h.t}
}

func (h *handle) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	n, err := h.tx().CopyFrom(ctx, table, columns, src)
	return n, h.t.record(err)
}

func (h *handle) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if isPlain(name, nil) && !isPlain(sql, nil) && !h.closed() {
		h.t.pending.anyText = true
	}
	sd, err := h.tx().Prepare(ctx, name, sql)
	return sd, h.t.record(err)
}

func (h *handle) LargeObjects() pgx.LargeObjects { return h.tx().LargeObjects() }

// Conn returns nil once the handle is stale: the connection is another's then. What waits for COMMIT is sent
// first, and from now on nothing waits.
func (h *handle) Conn() *pgx.Conn {
	h.Expose()
	return h.tx().Conn()
}

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

// Tx returns a closed transaction where the batch has tried to begin one inside this one.
func (b *batchResults) Tx() pgx.Tx {
	if b.BatchResults.Tx() == nil {
		return nil
	}
	return closedTx()
}
