package inboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/isolate"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// together processes members with different ids in one transaction, and ends them. The first try has no
// savepoints, because they cost two round trips each. If a handler fails, the second try has a savepoint
// around each handler. If the transaction fails as a whole, each half gets one of its own, until the message
// at fault is alone.
func (s *Store) together(ctx context.Context, members []*member) {
	search := isolate.New(isolate.Halves, members...)
	search.InOrder = true
	for group := search.Next(len(members)); group != nil; group = search.Next(len(members)) {
		if s.settled(ctx, group) {
			search.Clear(group...)
		} else {
			search.Failed(group...)
		}
	}
}

// settled runs the transaction of some members. It returns false if they should be divided.
func (s *Store) settled(ctx context.Context, members []*member) bool {
	members = left(members)
	if len(members) == 0 {
		return true
	}
	if len(members) == 1 {
		b := members[0]
		bounded, cancel := withTimeout(b.ctx, b.work.timeout)
		defer cancel()
		s.alone(bounded, b)
		if timeIsOver(ctx) && inboxdriver.Classify(b.result).Counted { // it may have had less time than it should
			b.end(inbox.Unavailable(b.result))
		}
		return true
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
	case errors.Is(err, errNoEntry):
		t.settleWithoutEntry(ctx)
		return s.settled(ctx, members)
	case t.hopeless(ctx, err):
		t.settleAll(ctx, err)
	default:
		return false
	}
	return true
}

// batch is a transaction of several messages.
type batch struct {
	s       *Store
	members []*member
	careful bool // use a savepoint around each handler

	handled bool // the entries were made in some attempt
	lost    bool // the connection was lost under a handler, before the context ended
}

func (t *batch) run(ctx context.Context) error {
	return t.s.transactor.DoWith(ctx, txretry.Options{Name: "inbox batch", Isolation: t.s.cfg.Isolation}, t.attempt)
}

func (t *batch) attempt(ctx context.Context, tx pgx.Tx) error {
	t.lost = false
	if err := t.record(ctx, tx); err != nil {
		return err
	}
	t.handled = true
	for _, some := range t.neighbours() {
		if err := t.handle(ctx, tx, some); err != nil {
			t.lost = connectionLost(ctx, tx)
			return &handlerError{err}
		}
	}
	return t.forget(ctx, tx)
}

// record makes the entries.
func (t *batch) record(ctx context.Context, tx pgx.Tx) error {
	msgs := make([]*inbox.Message, len(t.members))
	var keys []string
	for i, b := range t.members {
		msgs[i] = b.message()
		if t.s.parks.cfg.Load() != nil {
			keys = append(keys, b.key)
		}
	}
	first, err := t.s.entries.RecordAll(ctx, tx, t.s.consumer, msgs, keys)
	if err != nil {
		return err
	}
	for i, b := range t.members {
		b.first, b.failed = first[i], nil
	}
	if slices.Contains(first, false) {
		return errNoEntry
	}
	return nil
}

// neighbours returns the members, grouped by call of a handler.
func (t *batch) neighbours() (all [][]*member) {
	var many *batchHandler // of the last ones
	for _, b := range t.members {
		switch {
		case many != nil && b.work.many == many:
			all[len(all)-1] = append(all[len(all)-1], b)
		default:
			all, many = append(all, []*member{b}), b.work.many
		}
	}
	return all
}

// handle runs the handler of some neighbours. A returned error ends the attempt.
func (t *batch) handle(ctx context.Context, tx pgx.Tx, some []*member) error {
	if !t.careful {
		return call(ctx, tx, some)
	}
	search := isolate.New(isolate.Halves, some...)
	search.InOrder = true
	for group := search.Next(len(some)); group != nil; group = search.Next(len(some)) {
		err := guarded(ctx, tx, group)
		failure, contained := errors.AsType[*containedError](err)
		switch {
		case err == nil:
			search.Clear(group...)
		case !contained:
			return err
		case search.Failed(group...):
			group[0].failed = failure.err
		}
	}
	return nil
}

// containedError is a handler's failure that was undone by the rollback to its savepoint.
type containedError struct{ err error }

func (e *containedError) Error() string { return e.err.Error() }
func (e *containedError) Unwrap() error { return e.err }

// guarded calls the handler in a savepoint. Conflicts concern the whole transaction.
func guarded(ctx context.Context, tx pgx.Tx, some []*member) error {
	sp, err := tx.Begin(ctx)
	if err != nil {
		return err
	}
	err = call(ctx, sp, some)
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

// checkOpen returns an error if a handler has ended or broken the transaction, because the next handler needs
// it.
func checkOpen(tx pgx.Tx) error {
	switch txdriver.StateOf(tx) {
	case txdriver.Idle:
		return fmt.Errorf("inboxpgx: the handler ended the transaction: %w", txretry.ErrManaged)
	case txdriver.Failed:
		return fmt.Errorf("inboxpgx: the handler ignored a failed statement: %w", pgx.ErrTxCommitRollback)
	}
	return nil
}

// isConflict reports whether another attempt of the transaction may succeed.
func isConflict(err error) bool {
	code := sqlstate.Of(err)
	return code == "40001" || code == "40P01" || code == "55P03"
}

// call runs the handler itself.
func call(ctx context.Context, tx pgx.Tx, some []*member) error {
	return base.Safely(func() error {
		b := some[0]
		if b.work.many == nil {
			ctx, cancel := withTimeout(inTransaction{b.ctx, ctx}, b.work.timeout)
			defer cancel()
			return cmp.Or(b.work.one(ctx, tx), checkOpen(tx))
		}
		ctx, cancel := withTimeout(ctx, time.Duration(len(some))*b.work.timeout)
		defer cancel()
		items := make([]any, len(some))
		for i, b := range some {
			items[i] = b.work.item
		}
		return cmp.Or(b.work.many.run(ctx, tx, items), checkOpen(tx))
	})
}

// inTransaction is a message's context with the running transaction. A handler that starts another
// transaction gets an error. Values of the middleware are older than the transaction.
type inTransaction struct {
	context.Context
	tx context.Context
}

func (c inTransaction) Value(key any) any {
	if v := c.Context.Value(key); v != nil {
		return v
	}
	return c.tx.Value(key)
}

// forget deletes the entries of the failed messages.
func (t *batch) forget(ctx context.Context, tx pgx.Tx) error {
	var failed []uuid.UUID
	for _, b := range t.members {
		if b.failed != nil {
			failed = append(failed, b.message().ID)
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return t.s.entries.Forget(ctx, tx, t.s.consumer, failed)
}

// blames reports whether the error comes from a handler and the transaction could continue.
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
	case t.lost && !contextEnded(err), sqlstate.Unavailable(err):
		return true
	}
	return !handlers && !commitRefused(t.handled, err)
}

// settle ends the members after the transaction has committed.
func (t *batch) settle(ctx context.Context) {
	for _, b := range t.members {
		if b.failed == nil {
			t.s.passed.Add(1)
		}
		t.s.count.add(ctx, b.message().Name, done, b.failed)
		b.end(b.failed)
	}
}

// settleWithoutEntry ends the members for which the rolled-back transaction made no entry. A member whose key
// is no longer stopped is left for the next transaction.
func (t *batch) settleWithoutEntry(ctx context.Context) {
	var without []*member
	var msgs []*inbox.Message
	for _, b := range t.members {
		if !b.first {
			without, msgs = append(without, b), append(msgs, b.message())
		}
	}
	for i, missing := range t.s.entriesThere(ctx, msgs...) {
		if err := t.s.withoutEntry(ctx, without[i], missing); !errors.Is(err, errFree) {
			without[i].end(err)
		}
	}
}

// settleAll ends the members with an error that is not their own. If the time of the batch is over, one of
// them may have used it up: all are unavailable, and each is tried alone.
func (t *batch) settleAll(ctx context.Context, err error) {
	switch {
	case noChance(ctx, t.handled):
		err = inbox.Postpone(err, 0)
	case ctx.Err() == nil, timeIsOver(ctx):
		err = inbox.Unavailable(fmt.Errorf("inboxpgx: transaction of a batch: %w", err))
	}
	for _, b := range t.members {
		t.s.count.add(ctx, b.message().Name, done, err)
		b.end(err)
	}
}
