package txretry

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// Options are the settings of one call. Every zero field that [Config] has too
// takes its value from there.
type Options struct {
	// Name is the name of the operation in spans, metrics, logs and errors, such
	// as "seats.hold". Keep it to a small set of values.
	Name string

	Isolation   pgx.TxIsoLevel // see [Config]
	ReadOnly    bool           // the server refuses writes
	MaxAttempts int            // see [Config]

	LockTimeout, StatementTimeout time.Duration // see [Config]
	IdleTimeout, CommitTimeout    time.Duration // see [Config]

	// NoWait says that a lock which is not available is an answer, as for
	// SELECT … FOR UPDATE NOWAIT: 55P03 is not retried. A lock_timeout that has
	// run out has the same SQLSTATE, so it is not retried either.
	NoWait bool

	// RetryConstraints retries unique_violation (23505) and exclusion_violation
	// (23P01), too: for an fn that looks before it inserts, so that the next
	// attempt sees what the other one has inserted. When they persist, Do returns
	// the last of them as it is.
	RetryConstraints bool

	// Savepoint is for a call that may be made inside the fn of another call on the
	// same database: fn then runs in a savepoint of the running transaction. If fn
	// fails, what it did is rolled back and the error returned, and the outer fn
	// goes on. Nothing commits before the outer call does. Attempts, timeouts,
	// SerialKey and Witness are those of the outer call, which alone retries: its
	// fn should return a transient error. An Isolation above that of the outer call
	// and ReadOnly inside one that writes are refused. Without Savepoint such a call
	// returns ErrNested.
	Savepoint bool

	// SerialKey names what the call contends for, such as "event:42". The calls
	// of this manager with the same key run one after another, first come first
	// served, and wait without holding a connection: a hot row costs a queue
	// instead of a storm of serialization failures. As all of them wait for the one
	// that is retried, its delays are shorter; see Config.BaseDelay. "" does not queue.
	SerialKey string

	// Witness finds out what became of this call's COMMIT if its answer is lost, by
	// a row that fn has written. It runs in a READ COMMITTED transaction of its own,
	// which is always rolled back. Committed is success, with the AfterCommit
	// functions run; not committed is tried again, as long as there are attempts. An
	// error asks again, for 10 s; then Do returns *CommitUnknownError.
	// Default: see [Config].XactStatus.
	//
	// A SELECT that finds nothing proves nothing, for the lost transaction may be
	// committing still. Witness should INSERT the row, which waits for the other
	// transaction: a unique violation means committed, success that it was not. That
	// holds if fn had run its own INSERT as a statement, not through [AtCommit], and
	// if the row stays: a message of an outbox is a witness only where published rows
	// are kept. (idempotencypgx.Store resolves its transactions in this way by
	// itself.)
	Witness func(ctx context.Context, tx pgx.Tx) (committed bool, err error)

	// AtBegin is a statement that is run together with BEGIN, in one round trip,
	// before fn, in every attempt. Its failure counts as one of BEGIN: fn is not
	// called, and what is transient is retried. It must not end the transaction.
	// Its Look, if there is one, runs ahead of BEGIN, outside of the transaction.
	// Optional.
	AtBegin driver.Statement
}

// withDefaults fills the zero fields from the manager's Config.
func (o Options) withDefaults(c *Config) Options {
	o.Isolation = cmp.Or(o.Isolation, c.Isolation)
	o.MaxAttempts = cmp.Or(o.MaxAttempts, c.MaxAttempts)
	o.LockTimeout = cmp.Or(o.LockTimeout, c.LockTimeout)
	o.StatementTimeout = cmp.Or(o.StatementTimeout, c.StatementTimeout)
	o.IdleTimeout = cmp.Or(o.IdleTimeout, c.IdleTimeout)
	o.CommitTimeout = cmp.Or(o.CommitTimeout, c.CommitTimeout, max(o.LockTimeout, defaultLockTimeout)+time.Second)
	return o
}

// patience is how long the server may be silent after a statement: a little longer than the
// statement may wait for a lock, or take, so that the server answers first. 0: without end.
func (o *Options) patience() time.Duration {
	switch {
	case o.StatementTimeout < 0:
		return 0
	case o.StatementTimeout > 0:
		return max(o.StatementTimeout, time.Second) + time.Second
	}
	return max(o.LockTimeout, defaultLockTimeout) + time.Second
}

// first is the statement that travels with BEGIN, nil if there is none.
func (o *Options) first() *driver.Statement {
	if o.AtBegin.SQL == "" {
		return nil
	}
	return &o.AtBegin
}

func (o *Options) validate() error {
	return errors.Join(
		checkIsolation("Options.Isolation", o.Isolation),
		checkAttempts("Options.MaxAttempts", o.MaxAttempts),
		checkServerTimeout("Options.LockTimeout", o.LockTimeout),
		checkOptionalTimeout("Options.StatementTimeout", o.StatementTimeout),
		checkOptionalTimeout("Options.IdleTimeout", o.IdleTimeout),
		checkPositive("Options.CommitTimeout", o.CommitTimeout),
		o.checkAtBegin(),
	)
}

func (o *Options) checkAtBegin() error {
	if o.AtBegin.SQL == "" && (o.AtBegin.Done != nil || o.AtBegin.Look != nil || len(o.AtBegin.Args) > 0) {
		return errors.New("txretry: Options.AtBegin has no SQL")
	}
	return nil
}
