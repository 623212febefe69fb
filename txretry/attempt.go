package txretry

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/internal/session"
)

// result is what became of one attempt.
type result struct {
	err      error    // nil: committed
	phase    Phase    // where err arose
	sqlstate string   // transient SQLSTATE: a new attempt may succeed
	hooks    []func() // to run after the commit
}

// attempt runs fn in one fresh transaction. However it is left, by panic or
// runtime.Goexit too, the transaction is over and the connection released.
func (c *call) attempt(ctx context.Context) result {
	s, err := c.m.source.Acquire(ctx)
	if err != nil {
		return result{err: fmt.Errorf("txretry: acquire a connection: %w", err), phase: PhaseAcquire}
	}
	t := newTransaction(s)
	defer c.release(ctx, t)

	if err := s.Begin(ctx, c.spec); err != nil {
		return result{err: fmt.Errorf("txretry: begin: %w", err), phase: PhaseBegin, sqlstate: transient(err)}
	}
	err = c.fn(context.WithValue(ctx, c.m.marker, t), &t.root)
	t.close()
	switch {
	case s.State() == session.Idle:
		c.outcome = Unknown
		return result{err: endedByFn(err), phase: PhaseFn}
	case err != nil:
		return failedFn(t, err)
	}
	return c.commit(ctx, t)
}

// release rolls back what has not ended and gives the connection back.
func (c *call) release(ctx context.Context, t *transaction) {
	t.done.Store(true)
	defer t.session.Close()
	if c.outcome == Committed {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.m.cfg.RollbackTimeout)
	defer cancel()
	if err := t.session.Rollback(ctx); err != nil {
		c.m.cfg.Logger.DebugContext(ctx, "txretry: rollback failed, connection closed", "name", c.opts.Name, "error", err)
	}
}

// failedFn decides about an error of fn. If it hides what the server said, the
// server's word decides.
func failedFn(t *transaction, err error) result {
	res := result{err: err, phase: PhaseFn, sqlstate: transient(err)}
	if res.sqlstate == "" && t.session.State() == session.Failed && isMute(err) {
		if res.sqlstate = transient(t.failure); res.sqlstate != "" {
			res.err = fmt.Errorf("%w: %w", err, t.failure)
		}
	}
	return res
}

// commit sends COMMIT, unless it is known beforehand that it cannot succeed.
func (c *call) commit(ctx context.Context, t *transaction) result {
	if err := committable(ctx, t); err != nil {
		return result{err: err, phase: PhaseCommit, sqlstate: transient(err)}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.m.cfg.CommitTimeout)
	defer cancel()
	outcome, err := t.session.Commit(ctx, t.last)
	switch outcome {
	case session.Committed:
		c.outcome = Committed
		return result{hooks: t.hooks}
	case session.RolledBack:
		return result{err: err, phase: PhaseCommit, sqlstate: transient(err)}
	}
	c.outcome = Unknown
	return result{err: &CommitUnknownError{Name: c.opts.Name, Err: err}, phase: PhaseCommit}
}

// endedByFn is the error for an fn that ran a COMMIT or ROLLBACK as a
// statement: nobody but fn knows which, so it is not retried.
func endedByFn(err error) error {
	return because("fn ended the transaction by a statement of its own", ErrManaged, err)
}

// committable returns why COMMIT is not worth sending. As it is not sent, the
// transaction is rolled back for certain.
func committable(ctx context.Context, t *transaction) error {
	switch t.session.State() {
	case session.Failed:
		return because("rolled back: a statement failed and fn returned nil", pgx.ErrTxCommitRollback, t.failure)
	case session.Lost:
		return because("rolled back: connection lost before COMMIT", pgx.ErrTxCommitRollback, t.failure)
	case session.Busy:
		return because("rolled back: fn returned with the rows of a query still open", pgx.ErrTxCommitRollback, nil)
	}
	if t.broken != nil {
		return because("rolled back: a savepoint could not be ended", pgx.ErrTxCommitRollback, t.broken)
	}
	if ctx.Err() != nil {
		return because("rolled back: context ended before COMMIT", ended(ctx), nil)
	}
	return nil
}

func because(text string, err, cause error) error {
	if cause == nil {
		return fmt.Errorf("txretry: %s: %w", text, err)
	}
	return fmt.Errorf("txretry: %s: %w: %w", text, err, cause)
}
