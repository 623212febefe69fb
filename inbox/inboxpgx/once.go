package inboxpgx

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// delivery is the transaction of one delivery, with what its last attempt came to.
type delivery struct {
	s  *Store
	b  *member
	m  *inbox.Message
	fn func(ctx context.Context, tx pgx.Tx) error

	recorded *pgconn.CommandTag // of the insert that travelled with BEGIN, in this attempt
	handled  bool               // the entry was made and fn began, in some attempt
	lost     bool               // the connection was lost under fn, before its context ended
}

// handlerError tells the errors of fn from those of the transaction around it.
type handlerError struct{ err error }

func (e *handlerError) Error() string { return e.err.Error() }
func (e *handlerError) Unwrap() error { return e.err }

// alone does the work and records the message in one transaction, unless it was recorded before. It
// ends the member.
func (s *Store) alone(ctx context.Context, b *member) {
	m := b.message()
	b.end(safely(func() error {
		for {
			d := &delivery{s: s, b: b, m: m, fn: b.work.one}
			opts := txretry.Options{Name: "inbox " + m.Name, Isolation: s.cfg.Isolation}
			if s.table != nil {
				opts.AtBegin = s.atBegin(b)
				opts.AtBegin.Done = func(tag pgconn.CommandTag) { d.recorded = &tag }
			}
			err := s.transactor.DoWith(ctx, opts, d.attempt)
			outcome := done
			if errors.Is(err, errNoEntry) {
				if outcome, err = s.withoutEntry(ctx, b, s.entriesThere(ctx, m)[0]); errors.Is(err, errFree) {
					continue
				}
			}
			err = d.verdict(ctx, err)
			if err == nil && outcome == done {
				s.passed.Add(1)
			}
			s.count.add(ctx, m.Name, outcome, err)
			return err
		}
	}))
}

// atBegin is the statement that makes the entry of a message.
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

// record makes the entry, unless the Transactor has done so with BEGIN.
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

// withoutEntry returns what became of a message for which no entry was made. It is a duplicate if its entry is not missing.
// Else its key is stopped, and it waits with the key. The error is errFree if the key is stopped no more: try again. If
// that happens twice the key is not to blame.
func (s *Store) withoutEntry(ctx context.Context, b *member, missing error) (outcome, error) {
	switch {
	case b.head != nil && errors.Is(missing, ErrIgnored):
		return done, fmt.Errorf("another process runs the key, or: %w", missing)
	case missing == nil || b.key == "" || !errors.Is(missing, ErrIgnored):
		return duplicate, missing
	}
	waits, err := s.wait(ctx, b)
	switch {
	case err != nil || waits:
		return parked, err
	case b.free:
		return done, missing
	}
	b.free = true
	return parked, errFree
}

// entriesThere returns nil for each message that has an entry. A message without one is no duplicate: its entry
// could not be made, and acknowledging it would lose it.
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

// verdict says whose failure an error of the transaction is: see the package comment.
func (d *delivery) verdict(ctx context.Context, err error) error {
	_, commitUnknown := errors.AsType[*txretry.CommitUnknownError](err)
	_, lockTimeout := errors.AsType[*txretry.LockTimeoutError](err)
	_, handlers := errors.AsType[*handlerError](err)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errParkedFull):
		return inbox.Postpone(err, fullPause)
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

// explain tells of a table that was never created.
func (s *Store) explain(err error) error {
	if s.table != nil {
		return s.table.missing.Explain(err)
	}
	return err
}

// noChance reports whether a deadline, the handler's or the consumer's, has passed before the
// handler began: there was no connection, or a copy is in progress elsewhere.
func noChance(ctx context.Context, handled bool) bool {
	return !handled && timeIsOver(ctx)
}

func timeIsOver(ctx context.Context) bool { return errors.Is(ctx.Err(), context.DeadlineExceeded) }

// endedByHandler reports whether the handler, not the server's state, ended the
// transaction: it called Do again, ran a COMMIT or ROLLBACK, or kept the transaction idle
// or open for longer than the server allows (25P03, 25P04).
func endedByHandler(err error) bool {
	if errors.Is(err, txretry.ErrNested) || errors.Is(err, txretry.ErrManaged) {
		return true
	}
	code := sqlstate.Of(err)
	return code == "25P03" || code == "25P04"
}

// contextEnded reports whether a context of the handler's own ended during a statement:
// pgx closes the connection then, too.
func contextEnded(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// plain returns the handler's error as it is, if nothing is added to it.
func plain(err error) error {
	if own, ok := err.(*handlerError); ok {
		return own.err
	}
	return err
}

// commitRefused reports whether the handler succeeded and then its transaction could not
// commit: a deferred constraint, for example, or an error that the handler ignored.
func commitRefused(handled bool, err error) bool {
	if !handled {
		return false
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return false
	}
	return sqlstate.Of(err) != "" || errors.Is(err, pgx.ErrTxCommitRollback)
}
