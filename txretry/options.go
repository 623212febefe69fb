package txretry

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// Options are the settings of one call. Every zero field that [Config] has too
// takes its value from there.
type Options struct {
	// Name is the name of the operation in spans, metrics, logs and errors, such
	// as "seats.hold". Keep it to a small set of values.
	Name string

	Isolation   pgx.TxIsoLevel
	ReadOnly    bool
	Deferrable  bool // SERIALIZABLE and ReadOnly only: waits for a safe snapshot, up to 5 minutes without a StatementTimeout
	MaxAttempts int

	LockTimeout, StatementTimeout   time.Duration
	IdleTimeout, TransactionTimeout time.Duration
	CommitTimeout, DeadlineMargin   time.Duration

	// NoWait says that a lock which is not available is an answer, as for
	// SELECT … FOR UPDATE NOWAIT: 55P03 is not retried. A lock_timeout that has
	// run out has the same SQLSTATE, so it is not retried either.
	NoWait bool

	// RetryConstraints retries unique_violation (23505) and exclusion_violation
	// (23P01), too: for an fn that looks before it inserts, so that the next
	// attempt sees what the other one has inserted. When they persist, Do returns
	// the last of them as it is.
	RetryConstraints bool

	// Resolver finds out what became of this call's COMMIT if its answer is lost.
	Resolver Resolver

	// AtBegin is a first statement of the transaction, in every attempt, which
	// saves its round trip. Zero: none.
	AtBegin AtBegin

	// Nested says what to do when the call is made inside the fn of another call
	// on the same database; "" means NestedError.
	Nested Nested

	// SerialKey names what the call contends for, such as "event:42". The calls
	// of this manager with the same key run one after another, first come first
	// served, and wait without holding a connection: a hot row costs a queue
	// instead of a storm of serialization failures. "" does not queue.
	SerialKey string
}

// AtBegin is one statement that is run together with BEGIN, in one round trip,
// before fn. Its failure counts as one of BEGIN: fn is not called, and what is
// transient is retried. It must not end the transaction.
type AtBegin struct {
	SQL  string // "" means no statement; Done must be nil then
	Args []any  // must not be changed before Do returns

	// Done is told what the statement did, right before each call of fn; nil: nobody is.
	Done func(tag pgconn.CommandTag)
}

// statement is nil if there is none.
func (a *AtBegin) statement() *driver.Statement {
	if a.SQL == "" {
		return nil
	}
	return &driver.Statement{SQL: a.SQL, Args: a.Args}
}

// Nested is what becomes of a Do inside the fn of another Do.
type Nested string

// The ways to treat a nested call.
const (
	// NestedError refuses it with ErrNested.
	NestedError Nested = "error"

	// NestedSavepoint runs fn in a savepoint of the running transaction: if fn
	// fails, what it did is rolled back and the error returned, and the outer fn
	// goes on. Nothing commits before the outer call does. Attempts, timeouts,
	// SerialKey and Resolver are those of the outer call, which alone retries: its
	// fn should return a transient error. An Isolation above that of the outer call
	// and ReadOnly inside one that writes are refused.
	NestedSavepoint Nested = "savepoint"
)

// withDefaults fills the zero fields from the manager's Config.
func (o Options) withDefaults(c *Config) Options {
	o.Isolation = cmp.Or(o.Isolation, c.Isolation)
	o.MaxAttempts = cmp.Or(o.MaxAttempts, c.MaxAttempts)
	o.LockTimeout = cmp.Or(o.LockTimeout, c.LockTimeout)
	o.StatementTimeout = cmp.Or(o.StatementTimeout, c.StatementTimeout)
	o.IdleTimeout = cmp.Or(o.IdleTimeout, c.IdleTimeout)
	o.TransactionTimeout = cmp.Or(o.TransactionTimeout, c.TransactionTimeout)
	o.CommitTimeout = cmp.Or(o.CommitTimeout, c.CommitTimeout)
	o.DeadlineMargin = cmp.Or(o.DeadlineMargin, c.DeadlineMargin)
	if o.Resolver.ask == nil {
		o.Resolver = c.Resolver
	}
	return o
}

// safeSnapshot is how long a Deferrable transaction may wait for its snapshot: for the writers that
// run at its start, which no lock timeout bounds.
const safeSnapshot = 5 * time.Minute

// patience is how long the server may be silent after a statement: a little longer than the
// statement may wait for a lock, or take, so that the server answers first. 0: without end.
func (o *Options) patience() time.Duration {
	switch {
	case o.StatementTimeout < 0:
		return 0
	case o.StatementTimeout > 0:
		return max(o.StatementTimeout, time.Second) + time.Second
	case o.Deferrable:
		return safeSnapshot
	}
	return max(o.LockTimeout, defaultLockTimeout) + time.Second
}

func (o *Options) validate() error {
	return errors.Join(
		checkIsolation("Options.Isolation", o.Isolation),
		checkAttempts("Options.MaxAttempts", o.MaxAttempts),
		checkServerTimeout("Options.LockTimeout", o.LockTimeout),
		checkOptionalTimeout("Options.StatementTimeout", o.StatementTimeout),
		checkOptionalTimeout("Options.IdleTimeout", o.IdleTimeout),
		checkServerTimeout("Options.TransactionTimeout", o.TransactionTimeout),
		checkPositive("Options.CommitTimeout", o.CommitTimeout),
		checkMargin("Options.DeadlineMargin", o.DeadlineMargin),
		checkResolver("Options.Resolver", o.Resolver),
		o.checkDeferrable(),
		o.checkNested(),
		o.checkAtBegin(),
	)
}

func (o *Options) checkDeferrable() error {
	if o.Deferrable && (!o.ReadOnly || o.Isolation != pgx.Serializable) {
		return errors.New("txretry: Options.Deferrable needs ReadOnly and isolation serializable")
	}
	return nil
}

func (o *Options) checkAtBegin() error {
	if o.AtBegin.SQL == "" && (o.AtBegin.Done != nil || len(o.AtBegin.Args) > 0) {
		return errors.New("txretry: Options.AtBegin has no SQL")
	}
	return nil
}

func (o *Options) checkNested() error {
	switch o.Nested {
	case "", NestedError, NestedSavepoint:
		return nil
	}
	return fmt.Errorf("txretry: Options.Nested: unknown value %q", o.Nested)
}
