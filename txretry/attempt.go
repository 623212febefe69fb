package txretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// result is what became of one attempt.
type result struct {
	err      error  // nil: committed
	phase    string // where err arose
	again    bool   // a new attempt may succeed
	sqlstate string // for which reason, if the server gave one

	outOfOrder bool // the database could not do its work

	lost error  // COMMIT was sent, and this came instead of an answer
	xid  string // whose outcome is unknown then
}

// failedIn sorts an error of an attempt.
func (c *call) failedIn(phase string, err error) result {
	sqlstate := c.opts.transient(err)
	return result{err: err, phase: phase, again: sqlstate != "", sqlstate: sqlstate}
}

// attempt runs fn in one fresh transaction. However it is left, by panic or
// runtime.Goexit too, the transaction is over and the connection released.
func (c *call) attempt(ctx context.Context) result {
	s, tag, failed := c.open(ctx)
	if s == nil {
		return failed
	}
	t := c.transaction(ctx, s)
	defer c.release(ctx, t)
	if s.State() == driver.Idle { // AtBegin was a COMMIT or ROLLBACK
		c.outcome = driver.Unknown
		return result{err: because("AtBegin ended the transaction", ErrManaged, nil), phase: phaseBegin}
	}
	c.last = t
	if c.opts.AtBegin.Done != nil {
		c.opts.AtBegin.Done(tag)
	}
	if res := c.work(t); res.err != nil {
		return res
	}
	defer c.lap(&c.phases.commit)
	return c.commit(t)
}

// work runs fn. Its error is that of fn, or why the transaction cannot commit.
func (c *call) work(t *transaction) result {
	err := c.fn(&t.ctx, &t.root)
	t.close()
	c.lap(&c.phases.fn)
	switch {
	case t.session.State() == driver.Idle:
		c.outcome = driver.Unknown
		return result{err: endedByFn(err), phase: phaseFn}
	case err != nil:
		return c.failedFn(t, err)
	}
	if err := committable(t); err != nil {
		res := c.failedIn(phaseCommit, err)
		res.outOfOrder = t.lost()
		return res
	}
	return result{}
}

// transaction returns the state of a new attempt. Only the first one can live
// in the call itself: handles of an earlier attempt must stay stale.
func (c *call) transaction(ctx context.Context, s driver.Session) *transaction {
	t := &c.first
	if c.attempts > 1 {
		t = new(transaction)
	}
	t.open(ctx, c.m, s, c.opts.Isolation, c.opts.ReadOnly)
	return t
}

// release rolls back what has not ended and gives the connection back.
func (c *call) release(ctx context.Context, t *transaction) {
	if c.last == t && !t.done.Load() && t.session.State() == driver.Idle {
		c.outcome = driver.Unknown // fn ended the transaction by a statement, then panicked
	}
	t.done.Store(true)
	c.end(ctx, t.session, t.committed)
}

// end rolls back what has not ended and gives the connection back.
func (c *call) end(ctx context.Context, s driver.Session, committed bool) {
	defer s.Close()
	if committed {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.m.bounds.rollback)
	defer cancel()
	if err := s.Rollback(ctx); err != nil {
		c.m.cfg.Logger.DebugContext(ctx, "txretry: rollback failed, connection closed",
			slog.String("name", c.opts.Name), slog.Any("error", err))
	}
}

// failedFn decides about an error of fn. If it hides what the server said, the
// server's word decides.
func (c *call) failedFn(t *transaction, err error) result {
	res := c.failedIn(phaseFn, onStandby(t.session, err))
	if res.again || !isMute(err) {
		return res
	}
	if t.failure == nil { // a statement that did not run on the handle
		res.outOfOrder = t.lost() && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
		return res
	}
	server := c.failedIn(phaseFn, t.failure)
	server.outOfOrder = t.lost() || c.outOfOrder(t.failure)
	if !server.again && !server.outOfOrder {
		return res
	}
	if server.err = err; !errors.Is(err, t.failure) {
		server.err = fmt.Errorf("%w: %w", err, t.failure)
	}
	return server
}

// commit sends COMMIT.
func (c *call) commit(t *transaction) result {
	c.outcome = driver.Unknown // unless it returns: a tracer may panic
	outcome, err := t.session.Commit((*detached)(&t.ctx), c.opts.CommitTimeout, t.pending.atCommit())
	switch outcome {
	case driver.Committed:
		c.outcome, t.committed = driver.Committed, true
		return result{}
	case driver.RolledBack:
		c.outcome = driver.RolledBack
		res := c.failedIn(phaseCommit, err)
		res.again = res.again || errors.Is(err, driver.ErrNotSent)
		return res
	}
	if c.opts.ReadOnly { // it has no effect that could be unknown
		c.outcome = driver.RolledBack
		err = fmt.Errorf("txretry: COMMIT of a read-only transaction was not answered: %w", err)
		return result{err: err, phase: phaseCommit, again: true}
	}
	return result{err: &CommitUnknownError{Name: c.opts.Name, Err: err}, phase: phaseCommit, lost: err, xid: t.session.XID()}
}

// endedByFn is the error for an fn that ran a COMMIT or ROLLBACK as a
// statement: nobody but fn knows which, so it is not retried.
func endedByFn(err error) error {
	return because("fn ended the transaction by a statement of its own", ErrManaged, err)
}

// onStandby says so if a statement failed because the server is a hot standby.
func onStandby(s driver.Session, err error) error {
	if code := sqlstate.Of(err); (code == "25006" || code == "0A000") && s.Standby() {
		return fmt.Errorf("%w: %w", ErrStandby, err)
	}
	return err
}

// committable returns why COMMIT is not worth sending. As it is not sent, the
// transaction is rolled back for certain.
func committable(t *transaction) error {
	switch t.session.State() {
	case driver.Failed:
		return because("rolled back: a statement failed and fn returned nil", pgx.ErrTxCommitRollback, onStandby(t.session, t.failure))
	case driver.Lost:
		return because("rolled back: connection lost before COMMIT", pgx.ErrTxCommitRollback, t.failure)
	case driver.Busy:
		return because("rolled back: fn returned with the rows of a query still open", pgx.ErrTxCommitRollback, nil)
	}
	if t.broken != nil {
		return because("rolled back", pgx.ErrTxCommitRollback, t.broken)
	}
	if t.ctx.Err() != nil {
		return because("rolled back: context ended before COMMIT", ended(&t.ctx), nil)
	}
	return nil
}

func because(text string, err, cause error) error {
	if cause == nil {
		return fmt.Errorf("txretry: %s: %w", text, err)
	}
	return fmt.Errorf("txretry: %s: %w: %w", text, err, cause)
}
