package inboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/txretry"
)

// together processes members with different ids in one transaction. The first try has no
// savepoints, since they cost two round trips each; when a handler fails there is a second
// one, with a savepoint around each. When the transaction fails as a whole each half gets
// one of its own, so that in the end the message at fault is alone.
func (s *Store) together(ctx context.Context, members []*member) {
	if len(members) == 1 {
		b := members[0]
		b.settle(s.alone(b.ctx, b.m, b.work))
		return
	}
	t := &batch{s: s, members: members}
	err := t.run(ctx)
	if err != nil && t.blames(ctx, err) {
		t.careful = true
		err = t.run(ctx)
	}
	switch {
	case err == nil:
		t.settle(ctx)
	case t.hopeless(ctx, err):
		t.settleAll(ctx, err)
	default:
		half := len(members) / 2
		s.together(ctx, members[:half])
		s.together(ctx, members[half:])
	}
}

// batch is a transaction of several messages, with what its last attempt came to.
type batch struct {
	s       *Store
	members []*member
	careful bool // a savepoint around each handler

	handled bool // the entries were made, in some attempt
	lost    bool // the connection was lost under a handler, before the context ended
	first   []bool
	failed  []error // by member
}

func (t *batch) run(ctx context.Context) error {
	return t.s.transactor.DoWith(ctx, txretry.Options{Name: "inbox batch", Isolation: t.s.cfg.Isolation}, t.attempt)
}

func (t *batch) attempt(ctx context.Context, tx pgx.Tx) (err error) {
	msgs := make([]*inbox.Message, len(t.members))
	for i, b := range t.members {
		msgs[i] = b.m
	}
	t.lost, t.failed = false, make([]error, len(msgs))
	if t.first, err = t.s.entries.RecordAll(ctx, tx, t.s.consumer, msgs); err != nil {
		return err
	}
	t.handled = true
	for from := 0; from < len(msgs); {
		to := t.stretch(from)
		if t.first[from] {
			if err := t.handle(ctx, tx, from, to); err != nil {
				t.lost = connectionLost(ctx, tx)
				return &handlerError{err}
			}
		}
		from = to
	}
	return t.forget(ctx, tx)
}

// stretch returns where the neighbours end that are handled by one call.
func (t *batch) stretch(from int) (to int) {
	to = from + 1
	many := t.members[from].work.many
	for many != nil && t.first[from] && to < len(t.members) && t.first[to] && t.members[to].work.many == many {
		to++
	}
	return to
}

// handle runs the handler of the members from up to to. A returned error ends the attempt.
func (t *batch) handle(ctx context.Context, tx pgx.Tx, from, to int) error {
	if !t.careful {
		return t.call(ctx, tx, from, to)
	}
	err := t.guarded(ctx, tx, from, to)
	failure, contained := errors.AsType[*containedError](err)
	switch {
	case !contained:
		return err
	case to-from == 1:
		t.failed[from] = failure.err
		return nil
	}
	half := (from + to) / 2
	if err := t.handle(ctx, tx, from, half); err != nil {
		return err
	}
	return t.handle(ctx, tx, half, to)
}

// containedError is a handler's failure that the rollback to its savepoint has undone.
type containedError struct{ err error }

func (e *containedError) Error() string { return e.err.Error() }
func (e *containedError) Unwrap() error { return e.err }

// guarded calls the handler in a savepoint. Conflicts concern the whole transaction.
func (t *batch) guarded(ctx context.Context, tx pgx.Tx, from, to int) error {
	sp, err := tx.Begin(ctx)
	if err != nil {
		return err
	}
	err = t.call(ctx, sp, from, to)
	if err == nil {
		return sp.Commit(ctx)
	}
	if isConflict(err) || endedByHandler(err) || ctx.Err() != nil {
		return err
	}
	if undo := sp.Rollback(ctx); undo != nil {
		return errors.Join(err, undo)
	}
	return &containedError{err}
}

// checkOpen returns an error if a handler has ended or broken the transaction: the next one
// needs it open.
func checkOpen(tx pgx.Tx) error {
	conn := tx.Conn()
	if conn == nil { // a fake
		return nil
	}
	switch conn.PgConn().TxStatus() {
	case 'I':
		return fmt.Errorf("inboxpgx: the handler ended the transaction: %w", txretry.ErrManaged)
	case 'E':
		return fmt.Errorf("inboxpgx: the handler ignored a failed statement: %w", pgx.ErrTxCommitRollback)
	}
	return nil
}

// isConflict reports whether a new attempt of the transaction may go better.
func isConflict(err error) bool {
	answer, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (answer.Code == "40001" || answer.Code == "40P01" || answer.Code == "55P03")
}

// call runs the handler itself. Its panic is an error, so that the others can go on.
func (t *batch) call(ctx context.Context, tx pgx.Tx, from, to int) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &base.Panic{Value: v, Stack: debug.Stack()}
		}
	}()
	b := t.members[from]
	if b.work.many == nil {
		ctx, cancel := withTimeout(within{b.ctx, ctx}, b.work.timeout)
		defer cancel()
		return cmp.Or(b.work.one(ctx, tx), checkOpen(tx))
	}
	items := make([]any, 0, to-from)
	for _, b := range t.members[from:to] {
		items = append(items, b.work.item)
	}
	return cmp.Or(b.work.many.run(ctx, tx, items), checkOpen(tx))
}

// within is the context of a message, in which the batch's transaction is found, too.
type within struct {
	context.Context
	tx context.Context
}

func (w within) Value(key any) any {
	if v := w.Context.Value(key); v != nil {
		return v
	}
	return w.tx.Value(key)
}

// forget takes back the entries of those that failed.
func (t *batch) forget(ctx context.Context, tx pgx.Tx) error {
	var failed []uuid.UUID
	for i, err := range t.failed {
		if err != nil {
			failed = append(failed, t.members[i].m.ID)
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return t.s.entries.Forget(ctx, tx, t.s.consumer, failed)
}

// blames reports whether the error is a handler's, in a transaction that could go on.
func (t *batch) blames(ctx context.Context, err error) bool {
	_, handlers := errors.AsType[*handlerError](err)
	return handlers && !t.hopeless(ctx, err)
}

// hopeless reports whether the error would be the same for every part of the batch.
func (t *batch) hopeless(ctx context.Context, err error) bool {
	_, commitUnknown := errors.AsType[*txretry.CommitUnknownError](err)
	_, lockTimeout := errors.AsType[*txretry.LockTimeoutError](err)
	_, handlers := errors.AsType[*handlerError](err)
	switch {
	case commitUnknown, ctx.Err() != nil:
		return true
	case endedByHandler(err), lockTimeout:
		return false
	case t.lost && !contextEnded(err), outOfService(err):
		return true
	}
	return !handlers && !commitRefused(t.handled, err)
}

// settle tells the members what the committed transaction came to.
func (t *batch) settle(ctx context.Context) {
	for i, b := range t.members {
		duplicate, err := !t.first[i], t.failed[i]
		t.s.count.add(ctx, b.m.Name, duplicate, err)
		b.settle(err)
	}
}

// settleAll tells the members of a fault that is none of theirs.
func (t *batch) settleAll(ctx context.Context, err error) {
	switch {
	case noChance(ctx, t.handled):
		err = inbox.Postpone(err, 0)
	case ctx.Err() == nil:
		err = inbox.Unavailable(fmt.Errorf("inboxpgx: transaction of a batch: %w", err))
	}
	for _, b := range t.members {
		t.s.count.add(ctx, b.m.Name, false, err)
		b.settle(err)
	}
}
