package txretry

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// rowSlack limits how often the deadline is set: a row may have up to this much less than the full time.
const rowSlack = 100 * time.Millisecond

// guard limits how long the client waits for a reply on a connection. It uses the connection's deadline, because a
// context would allocate memory for every statement.
type guard struct {
	conn     *pgx.Conn
	patience time.Duration // the limit for a statement; 0: none
	since    time.Time     // the start of the last wait
	until    time.Time     // the end of the current wait; zero: there is none
	silent   bool          // the server did not answer in time
}

// expect starts a wait of at most d for the server; 0 means no limit.
func (g *guard) expect(d time.Duration) {
	g.since = time.Now()
	if d > 0 {
		g.until = g.since.Add(d)
		g.setDeadline(g.until)
	}
}

// expectMore restarts the time limit for the next part of the reply. If ctx has ended, pgx has set its own deadline,
// which must stay.
func (g *guard) expectMore(ctx context.Context) {
	if g.patience == 0 || time.Until(g.until) > g.patience-rowSlack || g.conn.IsClosed() {
		return
	}
	g.expect(g.patience)
	if ctx.Err() != nil {
		g.setDeadline(time.Now())
	}
}

// answered ends a wait with the result err. If the server did not answer in time, the returned error contains
// ErrSilent.
func (g *guard) answered(ctx context.Context, err error) error {
	if g.until.IsZero() {
		return err
	}
	late := err != nil && ctx.Err() == nil && !time.Now().Before(g.until)
	g.clear()
	if !late || !g.conn.IsClosed() {
		return err
	}
	g.silent = true
	return fmt.Errorf("%w: %w", driver.ErrSilent, err)
}

// clear removes the connection's deadline.
func (g *guard) clear() {
	if !g.until.IsZero() {
		g.until = time.Time{}
		g.setDeadline(time.Time{})
	}
}

// setDeadline sets the deadline unless the connection is closed, because pgx sets its own deadline on closed
// connections.
func (g *guard) setDeadline(at time.Time) {
	if pg := g.conn.PgConn(); !pg.IsClosed() {
		_ = pg.Conn().SetDeadline(at)
	}
}

// connTx runs statements in the connection's current transaction. The session begins and ends transactions and
// savepoints, so these methods of pgx.Tx are not called here.
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

// LargeObjects needs a transaction created by pgx. The statement sent as its BEGIN does nothing, but costs a round
// trip.
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

// closedTx returns a pgx.Tx whose methods all return pgx.ErrTxClosed.
func closedTx() pgx.Tx {
	var b pgx.Batch
	b.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(&b, pgx.ErrTxClosed).Tx()
}

// guardedRows gives the server the full time limit for every row. The caller may take any time between rows.
type guardedRows struct {
	pgx.Rows
	ctx context.Context
	g   *guard
	err error // of Query, or ErrSilent
}

// Conn returns nil, as pgx.Rows allows. Users get the connection from the handle only, which tracks this.
func (r *guardedRows) Conn() *pgx.Conn { return nil }

func (r *guardedRows) Next() bool {
	r.g.expectMore(r.ctx)
	if r.Rows.Next() {
		return true
	}
	r.ended()
	return false
}

func (r *guardedRows) Close() {
	r.g.expectMore(r.ctx)
	r.Rows.Close()
	r.ended()
}

func (r *guardedRows) ended() {
	if err := r.Rows.Err(); r.err == nil {
		r.err = r.g.answered(r.ctx, err)
	}
}

func (r *guardedRows) Err() error {
	if r.err != nil {
		return r.err
	}
	return r.Rows.Err()
}

// guardedRow is the one row of a QueryRow.
type guardedRow struct {
	pgx.Row
	ctx context.Context
	g   *guard
}

func (r *guardedRow) Scan(dest ...any) error {
	r.g.expectMore(r.ctx)
	return r.g.answered(r.ctx, r.Row.Scan(dest...))
}

// guardedResults gives the server the full time limit for every requested result. Close gives it the limit once for
// all remaining results.
type guardedResults struct {
	pgx.BatchResults
	ctx context.Context
	g   *guard
}

func (b *guardedResults) Exec() (pgconn.CommandTag, error) {
	b.g.expectMore(b.ctx)
	tag, err := b.BatchResults.Exec()
	return tag, b.failed(err)
}

func (b *guardedResults) Query() (pgx.Rows, error) {
	b.g.expectMore(b.ctx)
	rows, err := b.BatchResults.Query()
	err = b.failed(err)
	return &guardedRows{rows, b.ctx, b.g, err}, err
}

func (b *guardedResults) QueryRow() pgx.Row {
	b.g.expectMore(b.ctx)
	return &guardedRow{b.BatchResults.QueryRow(), b.ctx, b.g}
}

func (b *guardedResults) Close() error {
	b.g.expectMore(b.ctx)
	return b.g.answered(b.ctx, b.BatchResults.Close())
}

// failed returns the error of one result. Without an error, the wait continues.
func (b *guardedResults) failed(err error) error {
	if err == nil {
		return nil
	}
	return b.g.answered(b.ctx, err)
}

// copyLooks is the number of checks of a COPY within one time limit.
const copyLooks = 4

// copyWatch ends a COPY if the server accepts no more rows and does not answer. The time that the caller's source
// takes does not count.
type copyWatch struct {
	pgx.CopyFromSource
	g *guard

	steps atomic.Int64 // steps of the source; odd while the source is working
	mu    sync.Mutex
	timer *time.Timer
	seen  int64 // steps at the last check
	quiet int   // checks without a step
	done  bool
}

func watchCopy(g *guard, src pgx.CopyFromSource) *copyWatch {
	w := &copyWatch{CopyFromSource: src, g: g}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(g.patience/copyLooks, w.look)
	return w
}

func (w *copyWatch) Next() bool {
	w.steps.Add(1)
	defer w.steps.Add(1)
	return w.CopyFromSource.Next()
}

func (w *copyWatch) Values() ([]any, error) {
	w.steps.Add(1)
	defer w.steps.Add(1)
	return w.CopyFromSource.Values()
}

func (w *copyWatch) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done {
		return
	}
	steps := w.steps.Load()
	if steps != w.seen || steps%2 == 1 {
		w.seen, w.quiet = steps, 0
	} else {
		w.quiet++
	}
	if w.quiet < copyLooks {
		w.timer.Reset(w.g.patience / copyLooks)
		return
	}
	w.g.until = time.Now()
	_ = w.g.conn.PgConn().Conn().SetDeadline(w.g.until)
}

func (w *copyWatch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = true
	w.timer.Stop()
}
