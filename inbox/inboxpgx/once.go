package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/txretry"
)

// delivery is the transaction of one delivery, with what its last attempt came to.
type delivery struct {
	p  *Processor
	m  *inbox.Message
	fn func(ctx context.Context, tx pgx.Tx) error

	handled   bool // the entry was made and fn began, in some attempt
	duplicate bool
	lost      bool // the connection was lost under fn
}

// handlerError tells the errors of fn from those of the transaction around it.
type handlerError struct{ err error }

func (e *handlerError) Error() string { return e.err.Error() }
func (e *handlerError) Unwrap() error { return e.err }

// once runs fn and records the message in one transaction, unless it was recorded before.
func (p *Processor) once(ctx context.Context, m *inbox.Message, fn func(ctx context.Context, tx pgx.Tx) error) error {
	d := &delivery{p: p, m: m, fn: fn}
	opts := txretry.Options{Name: "inbox " + m.Name, Isolation: p.cfg.Isolation}
	err := p.transactor.DoWith(ctx, opts, d.attempt)
	if err == nil && d.duplicate && p.cfg.Hooks.OnDuplicate != nil {
		p.cfg.Hooks.OnDuplicate(ctx, m)
	}
	err = d.verdict(ctx, err)
	p.count.add(ctx, m.Name, d.duplicate, err)
	return err
}

func (d *delivery) attempt(ctx context.Context, tx pgx.Tx) error {
	d.lost = false
	first, err := d.p.dedup.Record(ctx, tx, d.p.cfg.Consumer, d.m.ID)
	if err != nil {
		return err
	}
	d.duplicate = !first
	if !first {
		return nil
	}
	d.handled = true
	err = d.fn(ctx, tx)
	d.lost = connectionLost(ctx, tx, err)
	if err != nil {
		return &handlerError{err}
	}
	return nil
}

// connectionLost reports whether the connection is gone for another reason than a context
// that ended: pgx closes it then, too, and that is the handler's affair.
func connectionLost(ctx context.Context, tx pgx.Tx, err error) bool {
	conn := tx.Conn()
	return conn != nil && conn.IsClosed() && ctx.Err() == nil &&
		!errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled)
}

// verdict says whose failure an error of the transaction is: see the package comment.
func (d *delivery) verdict(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*txretry.CommitUnknownError](err); ok {
		return inbox.Unavailable(err)
	}
	if _, ok := errors.AsType[*txretry.LockTimeoutError](err); ok {
		return d.lockTimeout(err)
	}
	own, isHandlers := errors.AsType[*handlerError](err)
	switch {
	case d.lost || outOfService(err):
		return inbox.Unavailable(err)
	case isHandlers && err == error(own):
		return own.err
	case isHandlers || d.commitRefused(err) || errors.Is(err, txretry.ErrNested):
		return err
	case ctx.Err() != nil && !d.handled && context.Cause(ctx) == errTimeout:
		return inbox.Postpone(err, 0) // no connection, or a copy in progress: the handler had no chance
	case ctx.Err() != nil:
		return err
	default:
		return inbox.Unavailable(fmt.Errorf("inboxpgx: transaction: %w", err))
	}
}

func (d *delivery) lockTimeout(err error) error {
	if d.handled {
		return inbox.Recoverable(err)
	}
	return inbox.Postpone(err, 0)
}

// commitRefused reports whether the handler succeeded and then its transaction could not
// commit: a deferred constraint, for example, or an error that the handler ignored.
func (d *delivery) commitRefused(err error) bool {
	if !d.handled {
		return false
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return false
	}
	_, refused := errors.AsType[*pgconn.PgError](err)
	return refused || errors.Is(err, pgx.ErrTxCommitRollback)
}

// outOfService reports whether the server says that it cannot work at present: class 08
// (connection), 53 (resources), 57P0x (shutdown, start-up), 25006 (read only, as a standby is).
func outOfService(err error) bool {
	answer, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (strings.HasPrefix(answer.Code, "08") || strings.HasPrefix(answer.Code, "53") ||
		strings.HasPrefix(answer.Code, "57P0") || answer.Code == "25006")
}
