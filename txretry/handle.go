package txretry

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// transaction is the state of one attempt, shared by the handle given to fn and the nested handles below it.
type transaction struct {
	session   driver.Session
	isolation pgx.TxIsoLevel
	readOnly  bool
	ctx       fnContext
	done      atomic.Bool // fn has returned: every handle is stale
	committed bool
	root      handle

	// Statements and functions for COMMIT and after it, from all handles.
	pending     *pending // own, or the pending of the outer call's transaction
	own         pending
	afterCommit []hook

	savepoints []savepoint // open ones, outermost first
	savepointN int         // number of the last one

	rows    pgx.Rows // of the last Query, whose error is known only later
	failure error    // the error that made the server abort the transaction
	broken  error    // why the transaction must not commit although the server would allow it
}

// handle is the pgx.Tx that fn uses: the outer one (id 0) or the handle of a savepoint.
type handle struct {
	t       *transaction
	id      int
	managed bool // ended by Do, not by fn
}

// running is the context key for the transaction of a running fn. Managers on the same source share it.
type running struct{ source any }

// fnContext is the context that fn receives. A nested Do finds the running transaction in it.
type fnContext struct {
	context.Context
	t      *transaction
	marker any // a running
}

func (c *fnContext) Value(key any) any {
	if key == c.marker {
		return c.t
	}
	return c.Context.Value(key)
}

// detached is fn's context without its end: COMMIT is not interrupted, but a tracer finds the context's values.
type detached fnContext

func (*detached) Deadline() (deadline time.Time, ok bool) { return time.Time{}, false }
func (*detached) Done() <-chan struct{}                   { return nil }
func (*detached) Err() error                              { return nil }

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

// record stores the first error that aborted the transaction, in case fn does not return it.
func (t *transaction) record(err error) error {
	if err != nil && t.failure == nil && !t.done.Load() {
		if state := t.session.State(); state == driver.Failed || state == driver.Lost {
			t.failure = err
		}
	}
	return err
}

// settle records the error of the last Query, which is unknown when Query returns.
func (t *transaction) settle() {
	if t.rows != nil {
		_ = t.record(t.rows.Err())
		t.rows = nil
	}
}

// tx returns the pgx.Tx for the next statement, or a closed one if the handle is stale.
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

// Statement lets txretrytest run the fake's replacement for a statement below a handle.
func (h *handle) Statement(run func(s driver.Session) error) error {
	if h.closed() {
		return pgx.ErrTxClosed
	}
	h.t.settle()
	return h.t.record(run(h.t.session))
}

// before sends the deferred statements if the next statement is not plain.
func (h *handle) before(ctx context.Context, sql string, args []any) error {
	if h.closed() {
		return nil // the statement will return pgx.ErrTxClosed
	}
	h.t.settle()
	return h.t.before(ctx, func() bool { return isPlain(sql, args) })
}

// Expose lets txretrysql return the transaction below the handle.
func (h *handle) Expose() {
	if !h.closed() {
		h.t.settle()
		h.t.expose()
	}
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

// Conn returns nil if the handle is stale, because the connection may belong to another user then. It first sends the
// deferred statements; after it, no statement is deferred.
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

// Tx returns a closed transaction if the batch tried to begin a transaction inside this one.
func (b *batchResults) Tx() pgx.Tx {
	if b.BatchResults.Tx() == nil {
		return nil
	}
	return closedTx()
}

// savepoint stores the state from before the savepoint.
type savepoint struct {
	id      int
	pending pending
	hooks   int
}

func (t *transaction) savepointIndex(id int) int {
	for i, sp := range t.savepoints {
		if sp.id == id {
			return i
		}
	}
	return -1
}

// Begin starts a savepoint and returns its handle.
func (h *handle) Begin(ctx context.Context) (pgx.Tx, error) {
	sp, err := h.savepoint(ctx)
	if err != nil {
		return nil, err
	}
	return sp, nil
}

func (h *handle) savepoint(ctx context.Context) (*handle, error) {
	t := h.t
	if h.closed() {
		return nil, pgx.ErrTxClosed
	}
	t.settle()
	id := t.savepointN + 1
	if err := t.session.Savepoint(ctx, id); err != nil {
		return nil, t.record(err)
	}
	t.savepointN = id
	t.savepoints = append(t.savepoints, savepoint{id, *t.pending, len(t.afterCommit)})
	return &handle{t: t, id: id}, nil
}

// Commit releases the savepoint. On the handle that Do passed to fn, it returns ErrManaged.
func (h *handle) Commit(ctx context.Context) error {
	if err := h.endable(); err != nil {
		return err
	}
	return h.release(ctx)
}

// Rollback rolls back to the savepoint and releases it. On the handle that Do passed to fn, it returns ErrManaged.
func (h *handle) Rollback(ctx context.Context) error {
	if err := h.endable(); err != nil {
		return err
	}
	return h.rollback(ctx)
}

func (h *handle) endable() error {
	switch {
	case h.closed():
		return pgx.ErrTxClosed
	case h.managed:
		return ErrManaged
	}
	return nil
}

func (h *handle) release(ctx context.Context) error {
	if _, err := h.endSavepoint(); err != nil {
		return err
	}
	return h.t.ended(h.t.session.Release(ctx, h.id))
}

func (h *handle) rollback(ctx context.Context) error {
	sp, err := h.endSavepoint()
	if err != nil {
		return err
	}
	t := h.t
	if err := t.session.RollbackTo(ctx, h.id); err != nil {
		return t.ended(err)
	}
	clear(t.afterCommit[sp.hooks:])
	t.afterCommit, t.failure = t.afterCommit[:sp.hooks], nil
	t.restore(sp.pending)
	return nil
}

// endSavepoint makes the handle of a savepoint stale, and the handles inside it.
func (h *handle) endSavepoint() (savepoint, error) {
	if h.closed() {
		return savepoint{}, pgx.ErrTxClosed
	}
	h.t.settle()
	i := h.t.savepointIndex(h.id)
	sp := h.t.savepoints[i]
	h.t.savepoints = h.t.savepoints[:i]
	return sp, nil
}

// ended handles the error of ending a savepoint. If the server did not reject the statement, it may not have received
// it. Then the transaction must not commit.
func (t *transaction) ended(err error) error {
	if err != nil && t.broken == nil && t.session.State() != driver.Failed {
		t.broken = fmt.Errorf("could not end a savepoint: %w", err)
	}
	return t.record(err)
}

// nested runs fn in a savepoint of the transaction t, or returns an error if that is not allowed.
func (m *Manager) nested(ctx context.Context, t *transaction, opts Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	full := opts.withDefaults(&m.cfg)
	if err := full.validate(); err != nil {
		return err
	}
	if !opts.Savepoint {
		return ErrNested
	}
	if opts.AtBegin.SQL != "" {
		return errors.New("txretry: Options.AtBegin is set in a nested call, which has no BEGIN")
	}
	if strength(opts.Isolation) > strength(t.isolation) {
		return fmt.Errorf("txretry: Options.Isolation %q of a nested call is above %q of the outer call", opts.Isolation, t.isolation)
	}
	if opts.ReadOnly && !t.readOnly {
		return errors.New("txretry: Options.ReadOnly is set in a nested call, but the outer call may write")
	}
	sp, err := t.root.savepoint(ctx)
	if err != nil {
		return fmt.Errorf("txretry: savepoint of a nested call: %w", err)
	}
	sp.managed = true
	ended := false
	defer func() {
		if !ended { // fn panicked: the outer fn may recover and continue
			_ = m.undo(ctx, sp)
		}
	}()
	err = fn(ctx, sp)
	t.settle()
	if err == nil && t.session.State() == driver.Failed {
		err = because("savepoint rolled back: a statement failed and fn returned nil", pgx.ErrTxCommitRollback, t.failure)
	}
	ended = true
	if err == nil {
		return sp.release(ctx)
	}
	if undone := m.undo(ctx, sp); undone != nil {
		return fmt.Errorf("%w (and its savepoint: %w)", err, undone)
	}
	return err
}

// undo rolls back to a savepoint. Like every rollback, it is not interrupted by ctx.
func (m *Manager) undo(ctx context.Context, sp *handle) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.bounds.rollback)
	defer cancel()
	return sp.rollback(ctx)
}
