package inboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

var errTimeout = errors.New("inboxpgx: handler's Timeout exceeded")

// withTimeout bounds a context; a timeout of 0 does not.
func withTimeout(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeoutCause(ctx, timeout, errTimeout)
}

// work is the work of a handler on one message.
type work struct {
	wait    inbox.Middleware                           // waits before the start; nil: no wait
	timeout time.Duration                              // 0 means none
	prepare func(ctx context.Context) error            // before the transaction; nil: nothing
	one     func(ctx context.Context, tx pgx.Tx) error // nil: nothing

	many *batchHandler // set for HandleBatch: does the same for neighbours of its kind
	item any           // this message, as an argument of many
}

// Handle registers fn for the messages of a name. The body is decoded by driver.Decode; one type may be
// registered under several names. fn must have no effects except through tx and txretry.AfterCommit, and must
// not change v: it may run more than once. Handle returns an error if fn is nil, or if the name is invalid or
// has a handler already. Config.ByName has its settings.
func Handle[T any](s *Store, name string, fn func(ctx context.Context, tx pgx.Tx, v T) error) error {
	if fn == nil {
		return fmt.Errorf("inboxpgx: handler of %q is nil", name)
	}
	return register(s, name, func(_ *inbox.Message, v T) *work {
		return &work{one: func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, v) }}
	})
}

// HandlePrepared is Handle with a step before the transaction, while no connection is held. Use it for slow
// calls to other systems. fn gets the result of prepare; errors of prepare are classed like errors of fn.
// Prepare runs once per delivery, even of a message that turns out to be a duplicate, so it must be
// repeatable. In a batch the Prepare steps of the messages run at the same time.
func HandlePrepared[T, P any](s *Store, name string, prepare func(ctx context.Context, v T) (P, error),
	fn func(ctx context.Context, tx pgx.Tx, v T, prepared P) error,
) error {
	if prepare == nil || fn == nil {
		return fmt.Errorf("inboxpgx: handler of %q is nil", name)
	}
	s.slow = true
	return register(s, name, func(_ *inbox.Message, v T) *work {
		var prepared P
		return &work{
			prepare: func(ctx context.Context) (err error) {
				prepared, err = prepare(ctx, v)
				return err
			},
			one: func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, v, prepared) },
		}
	})
}

// Item is one message for a batch handler.
type Item[T any] struct {
	Message *inbox.Message
	Value   T
}

// HandleBatch is Handle for a handler that takes several messages in one call, for example to write them with
// one statement. A call has the messages of its name that are adjacent in a batch and not duplicates; without
// batches, one message. If it fails it is called for each half, down to single messages, each call in a
// savepoint. So its error becomes the error of one message only. A Timeout is per message.
func HandleBatch[T any](s *Store, name string, fn func(ctx context.Context, tx pgx.Tx, items []Item[T]) error) error {
	if fn == nil {
		return fmt.Errorf("inboxpgx: handler of %q is nil", name)
	}
	many := &batchHandler{run: func(ctx context.Context, tx pgx.Tx, items []any) error {
		typed := make([]Item[T], len(items))
		for i, item := range items {
			typed[i] = item.(Item[T])
		}
		return fn(ctx, tx, typed)
	}}
	return register(s, name, func(m *inbox.Message, v T) *work {
		item := Item[T]{m, v}
		return &work{
			one:  func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, []Item[T]{item}) },
			many: many, item: item,
		}
	})
}

// batchHandler is shared by the messages of one HandleBatch.
type batchHandler struct {
	run func(ctx context.Context, tx pgx.Tx, items []any) error
}

// register adds a handler. begin returns its work on a message.
func register[T any](s *Store, name string, begin func(m *inbox.Message, v T) *work) error {
	cfg := s.cfg.ByName[name]
	var wait inbox.Middleware
	if cfg.Waiter != nil {
		wait, s.slow = inbox.Blocking(cfg.Waiter), true
	}
	err := s.mux.Route(name, func(m *inbox.Message) (any, error) {
		v, err := base.Into[T](func(v any) error { return s.mux.DecodeBody(m, v) })
		if err != nil {
			return nil, err
		}
		w := begin(m, v)
		w.wait, w.timeout = wait, cfg.Timeout
		return w, nil
	})
	if err == nil {
		s.handled[name] = true
	}
	return err
}

// errExited is the result of a message if a handler exited its goroutine or the goroutine of its transaction.
var errExited = errors.New("inboxpgx: a handler exited its goroutine")

// member is one message of a call of Process.
type member struct {
	call *inbox.Call
	ctx  context.Context // for its handler
	work *work
	key  string       // its ordering key, if keys are stopped; empty: none
	head *driver.Head // it is the first message of a stopped key; nil: it came from a queue

	begun func() // called when the transaction of the head has started
	free  bool   // the key was stopped in the last transaction, and free after it

	ended  bool // the result is final
	result error

	// In the last attempt of a batch's transaction:
	first  bool  // its entry was made
	failed error // its handler has failed and was rolled back
}

func (b *member) message() *inbox.Message { return b.call.Message }

func (b *member) end(result error) { b.ended, b.result = true, result }

// Process implements inbox.Processor: one transaction for all messages, as the package comment describes.
// Consumers form the batches (inbox.ConsumerConfig.Batch).
func (s *Store) Process(ctx context.Context, msgs []*inbox.Message) (results []error) {
	members := make([]*member, len(msgs))
	for i, call := range s.mux.Decode(msgs) {
		members[i] = &member{call: call, result: errExited, key: s.parks.keyOf(call.Message)}
	}
	defer s.slots.take(ctx, msgs)()
	results = make([]error, len(msgs))
	defer func() { // also if a handler exits the goroutine
		for i, b := range members {
			results[i] = b.call.End(b.result)
		}
	}()
	for _, b := range members {
		b.begin(ctx)
		s.parkEarly(b)
	}
	if len(members) == 1 {
		s.single(members[0])
		return results
	}
	prepareAll(members)
	for some := left(members); len(some) > 0; some = left(members) {
		s.together(ctx, distinct(some))
	}
	return results
}

// begin runs the message's middleware.
func (b *member) begin(ctx context.Context) {
	var err error
	if b.ctx, err = b.call.Begin(ctx); err != nil {
		b.end(err)
		return
	}
	switch w := b.call.Work.(type) {
	case *work:
		b.work = w
	case func(context.Context) error: // the work of Fallback
		b.work = &work{prepare: w}
	}
	b.work.timeout = cmp.Or(b.work.timeout, base.HandlerTimeout(ctx))
}

// single processes one message. Its Timeout covers all of its work.
func (s *Store) single(b *member) {
	if b.ended {
		return
	}
	ctx, cancel := b.prepare()
	defer cancel()
	if !b.ended {
		s.alone(ctx, b)
	}
}

// prepareAll runs the steps before the transaction of a batch, for all messages at the same time.
func prepareAll(members []*member) {
	var all sync.WaitGroup
	for _, b := range members {
		if !b.ended && (b.work.wait != nil || b.work.prepare != nil) {
			all.Go(func() {
				_, cancel := b.prepare()
				cancel()
			})
		}
	}
	all.Wait()
}

// prepare runs the Waiter and the step before the transaction. For some messages that is all of the work. The
// returned context is bounded by the Timeout.
func (b *member) prepare() (bounded context.Context, cancel context.CancelFunc) {
	err := errExited
	defer func() {
		if err != nil || b.work.one == nil {
			b.end(err)
		}
	}()
	if err = b.await(); err != nil {
		return b.ctx, func() {}
	}
	err = errExited
	bounded, cancel = withTimeout(b.ctx, b.work.timeout)
	err = base.Safely(func() error {
		if b.work.prepare == nil {
			return nil
		}
		err := b.work.prepare(bounded)
		if err == nil && bounded.Err() != nil && b.work.one != nil { // otherwise it would count as if there had been no connection
			err = fmt.Errorf("inboxpgx: the Prepare step used up the Timeout: %w", context.Cause(bounded))
		}
		return err
	})
	return bounded, cancel
}

// await runs the Waiter of the message's name.
func (b *member) await() error {
	if b.work.wait == nil {
		return nil
	}
	return base.Safely(func() error {
		_, _, err := b.work.wait(b.ctx, b.message())
		return err
	})
}

// left returns the members without a result.
func left(members []*member) (some []*member) {
	for _, b := range members {
		if !b.ended {
			some = append(some, b)
		}
	}
	return some
}

// distinct returns the members without further copies of one message. Those are processed later.
func distinct(members []*member) (some []*member) {
	seen := make(map[uuid.UUID]bool, len(members))
	for _, b := range members {
		if id := b.message().ID; !seen[id] {
			seen[id] = true
			some = append(some, b)
		}
	}
	return some
}

// apart runs fn in a goroutine of its own, which fn may exit.
func apart(fn func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		fn()
	}()
	<-ended
}

// delivery is the transaction of one delivery, with the results of its last attempt.
type delivery struct {
	s  *Store
	b  *member
	m  *inbox.Message
	fn func(ctx context.Context, tx pgx.Tx) error

	recorded *pgconn.CommandTag // of the INSERT sent with BEGIN, in this attempt
	handled  bool               // the entry was made and fn started, in some attempt
	lost     bool               // the connection was lost under fn, before its context ended
}

// handlerError distinguishes errors of fn from errors of the transaction around it.
type handlerError struct{ err error }

func (e *handlerError) Error() string { return e.err.Error() }
func (e *handlerError) Unwrap() error { return e.err }

// alone does the work and records the message in one transaction, unless it was recorded before. It ends the
// member.
func (s *Store) alone(ctx context.Context, b *member) {
	m := b.message()
	b.end(base.Safely(func() error {
		for {
			d := &delivery{s: s, b: b, m: m, fn: b.work.one}
			opts := txretry.Options{Name: "inbox " + m.Name, Isolation: s.cfg.Isolation}
			if s.table != nil {
				opts.AtBegin = s.atBegin(b)
				opts.AtBegin.Done = func(tag pgconn.CommandTag) { d.recorded = &tag }
			}
			err := s.transactor.DoWith(ctx, opts, d.attempt)
			if errors.Is(err, errNoEntry) {
				if err = s.withoutEntry(ctx, b, s.entriesThere(ctx, m)[0]); errors.Is(err, errFree) {
					continue
				}
				return err
			}
			if err = d.verdict(ctx, err); err == nil {
				s.passed.Add(1)
			}
			s.count.add(ctx, m.Name, done, err)
			return err
		}
	}))
}

// atBegin returns the statement that makes the entry of a message.
func (s *Store) atBegin(b *member) txdriver.Statement {
	if b.head != nil {
		return s.parks.place.(*parking).atBegin(b.head)
	}
	return s.table.atBegin(s.consumer, b.message().ID, b.key)
}

func (d *delivery) attempt(ctx context.Context, tx pgx.Tx) error {
	d.lost = false
	first, err := d.record(ctx, tx)
	if err != nil {
		return err
	}
	if !first {
		return errNoEntry
	}
	d.handled = true
	if d.b.begun != nil {
		d.b.begun()
	}
	err = d.fn(ctx, tx)
	d.lost = connectionLost(ctx, tx)
	if err != nil {
		return &handlerError{err}
	}
	return nil
}

// record makes the entry, unless the Transactor has sent the INSERT with BEGIN.
func (d *delivery) record(ctx context.Context, tx pgx.Tx) (first bool, err error) {
	if tag := d.recorded; tag != nil {
		d.recorded = nil
		return tag.RowsAffected() == 1, nil
	}
	if d.b.head != nil {
		return d.s.parks.place.Take(ctx, tx, d.b.head)
	}
	return d.s.entries.Record(ctx, tx, d.s.consumer, d.m.ID, d.b.key)
}

// errNoEntry rolls back a transaction that could not make the entry of a message: see withoutEntry.
var errNoEntry = errors.New("inboxpgx: no entry was made")

// withoutEntry returns the result of a message for which no entry was made. If the entry exists, the message
// is a duplicate. Otherwise its key is stopped, and the message waits with the key. The result is errFree if
// the key is no longer stopped: try again. If that happens twice, the key is not the cause.
func (s *Store) withoutEntry(ctx context.Context, b *member, missing error) error {
	if missing != nil && b.head == nil && b.key != "" && errors.Is(missing, ErrIgnored) {
		err := s.park(ctx, b)
		if !b.free || !errors.Is(err, errFree) {
			b.free = true
			return err
		}
	}
	if missing != nil {
		if b.head != nil {
			missing = fmt.Errorf("another process runs the key, or: %w", missing)
		}
		missing = inbox.Unavailable(missing)
	}
	s.count.add(ctx, b.message().Name, duplicate, missing)
	return missing
}

// entriesThere returns nil for each message that has an entry. A message without one is not a duplicate: its
// entry could not be made, and acknowledging it would lose it.
func (s *Store) entriesThere(ctx context.Context, msgs ...*inbox.Message) (missing []error) {
	ids := make([]uuid.UUID, len(msgs))
	for i, m := range msgs {
		ids[i] = m.ID
	}
	missing = make([]error, len(msgs))
	there, err := s.entries.Recorded(ctx, s.consumer, ids)
	for i, id := range ids {
		switch {
		case err != nil:
			missing[i] = err
		case !there[i]:
			missing[i] = fmt.Errorf("inboxpgx: record message %s: %w", id, s.ignored("its entry"))
		}
	}
	return missing
}

// ignored returns the error of a change of an entry that had no effect.
func (s *Store) ignored(change string) error {
	if s.table != nil {
		return pgcall.Ignored(s.table.names.entries, change)
	}
	return fmt.Errorf("Config.Entries ignored %s: %w", change, ErrIgnored)
}

func connectionLost(ctx context.Context, tx pgx.Tx) bool {
	return ctx.Err() == nil && txdriver.StateOf(tx) == txdriver.Lost
}

// verdict classifies an error of the transaction: see the package comment.
func (d *delivery) verdict(ctx context.Context, err error) error {
	_, commitUnknown := errors.AsType[*txretry.CommitUnknownError](err)
	_, lockTimeout := errors.AsType[*txretry.LockTimeoutError](err)
	_, handlers := errors.AsType[*handlerError](err)
	switch {
	case err == nil:
		return nil
	case endedByHandler(err):
		return plain(err)
	case commitUnknown:
		return inbox.Unavailable(err)
	case lockTimeout && d.handled:
		return inbox.Recoverable(err)
	case lockTimeout:
		return inbox.Postpone(err, 0)
	case d.lost && !contextEnded(err), sqlstate.Unavailable(err):
		return inbox.Unavailable(err)
	case handlers || commitRefused(d.handled, err):
		return plain(err)
	case noChance(ctx, d.handled):
		return inbox.Postpone(err, 0)
	case ctx.Err() != nil:
		return err
	default:
		return inbox.Unavailable(fmt.Errorf("inboxpgx: transaction: %w", d.s.explain(err)))
	}
}

// explain adds to an error that a table was never created.
func (s *Store) explain(err error) error {
	if s.table != nil {
		return s.table.missing.Explain(err)
	}
	return err
}

// noChance reports whether a deadline, of the handler or the consumer, passed before the handler started:
// there was no connection, or a copy is in progress elsewhere.
func noChance(ctx context.Context, handled bool) bool {
	return !handled && timeIsOver(ctx)
}

func timeIsOver(ctx context.Context) bool { return errors.Is(ctx.Err(), context.DeadlineExceeded) }

// endedByHandler reports whether the handler, not the server's state, ended the transaction: it called Do
// again, ran a COMMIT or ROLLBACK, or kept the transaction idle or open for longer than the server allows
// (25P03, 25P04).
func endedByHandler(err error) bool {
	if errors.Is(err, txretry.ErrNested) || errors.Is(err, txretry.ErrManaged) {
		return true
	}
	code := sqlstate.Of(err)
	return code == "25P03" || code == "25P04"
}

// contextEnded reports whether a context of the handler ended during a statement. Then pgx closes the
// connection, too.
func contextEnded(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// plain returns the handler's error unwrapped if it was not wrapped further.
func plain(err error) error {
	if own, ok := err.(*handlerError); ok {
		return own.err
	}
	return err
}

// commitRefused reports whether the handler succeeded and then its transaction could not commit, for example
// because of a deferred constraint or an error ignored by the handler.
func commitRefused(handled bool, err error) bool {
	if !handled {
		return false
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return false
	}
	return sqlstate.Of(err) != "" || errors.Is(err, pgx.ErrTxCommitRollback)
}
