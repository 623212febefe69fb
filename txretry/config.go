package txretry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// Config configures a [Manager]. The zero value is usable: SERIALIZABLE, a lock timeout of 8 s and 6
// attempts.
type Config struct {
	// Isolation of every transaction. Default: pgx.Serializable.
	Isolation pgx.TxIsoLevel

	// MaxAttempts bounds how often a function is run; 1 means no retry. Default: 6.
	MaxAttempts int

	// LockTimeout bounds each single wait for a lock: SET LOCAL lock_timeout, rounded up to
	// milliseconds. Default: 8 s.
	LockTimeout time.Duration

	// StatementTimeout bounds each statement: SET LOCAL statement_timeout, rounded up to milliseconds.
	// A value not above LockTimeout ends lock waits first, with 57014, which is not retried.
	// Default: the server's setting.
	//
	// A server that is silent for longer than its own timeout allows is given up: after a second more
	// than StatementTimeout (2 s at least), or, where that is 0, a second more than LockTimeout (9 s at
	// least). So a statement that takes longer than 9 s needs a StatementTimeout. Negative: the
	// server's setting, and it may be silent without end.
	StatementTimeout time.Duration

	// IdleTimeout bounds how long a transaction may be open without a statement, because fn does
	// something else or its process has vanished from the network: SET LOCAL
	// idle_in_transaction_session_timeout, rounded up to milliseconds. The server then closes the
	// connection and gives up the locks. Default: 30 s. Negative: the server's setting.
	IdleTimeout time.Duration

	// BaseDelay and MaxDelay shape the delay after failed attempt n:
	// min(MaxDelay, U(0.5, 1.5) × BaseDelay × 2^n), where U is a random number. With Options.SerialKey
	// it is min(MaxDelay, U(0.5, 1.5) × BaseDelay/50 × 4^n). Default: 50 ms and 1 s.
	BaseDelay, MaxDelay time.Duration

	// XactStatus has the server asked, with pg_xact_status, what became of a COMMIT whose answer was
	// lost: committed is success, rolled back is tried again. The transaction's id must be known before,
	// so each call that writes ends its begin message in SELECT pg_current_xact_id(): no round trip more,
	// but some work for the server, and an id used up even if fn writes nothing. A server that has crashed
	// since BEGIN is not believed, since it may have given the id to another transaction: the outcome stays
	// unknown. After a failover that has lost transactions, and where the server's clock was set forward
	// after a crash, the id may denote another one all the same; where that must not happen use
	// Options.Witness.
	// Default: nobody asks, and Do returns *CommitUnknownError.
	XactStatus bool

	// CommitTimeout bounds COMMIT, which the caller's context does not interrupt. A COMMIT that exceeds
	// it has an unknown outcome. Keep it above LockTimeout: a statement that travels with COMMIT may
	// wait for a lock. Default: a second more than LockTimeout, 9 s at least.
	CommitTimeout time.Duration

	// Rand returns a number from [0, 1) for the delays, and is called from many goroutines.
	// Default: math/rand/v2.
	Rand func() float64

	Logger         *slog.Logger         // Default: slog.Default().
	TracerProvider trace.TracerProvider // Default: the global one.
	MeterProvider  metric.MeterProvider // Default: the global one.
}

const defaultLockTimeout = 8 * time.Second

func (c Config) withDefaults() Config {
	c.Isolation = cmp.Or(c.Isolation, pgx.Serializable)
	c.MaxAttempts = cmp.Or(c.MaxAttempts, 6)
	c.LockTimeout = cmp.Or(c.LockTimeout, defaultLockTimeout)
	c.IdleTimeout = cmp.Or(c.IdleTimeout, 30*time.Second)
	c.BaseDelay = cmp.Or(c.BaseDelay, 50*time.Millisecond)
	c.MaxDelay = cmp.Or(c.MaxDelay, time.Second)
	if c.Rand == nil {
		c.Rand = rand.Float64
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	return errors.Join(
		checkIsolation("Config.Isolation", c.Isolation),
		checkAttempts("Config.MaxAttempts", c.MaxAttempts),
		checkServerTimeout("Config.LockTimeout", c.LockTimeout),
		checkOptionalTimeout("Config.StatementTimeout", c.StatementTimeout),
		checkOptionalTimeout("Config.IdleTimeout", c.IdleTimeout),
		checkPositive("Config.BaseDelay", c.BaseDelay),
		checkPositive("Config.MaxDelay", c.MaxDelay),
		checkNotNegative("Config.CommitTimeout", c.CommitTimeout),
	)
}

// policy returns how the delays grow and spread.
func (c Config) policy() backoff.Policy {
	return backoff.Policy{Base: c.BaseDelay, Factor: 2, Max: c.MaxDelay, Jitter: 0.5}
}

// inTurn returns how they do so for a call that has the turn of its SerialKey: from 4 ms by default, by
// the factor 4 up to the same maximum. Those it contends with stand in line behind it: there are few to
// keep out of the way of, and all of them wait.
func (c Config) inTurn() backoff.Policy {
	return backoff.Policy{Base: c.BaseDelay / 50, Factor: 4, Max: c.MaxDelay, Jitter: 0.5}
}

// bounds are the waits for the server that nobody needs to set, whatever the context.
type bounds struct {
	// acquire bounds the wait for a connection.
	acquire time.Duration
	// begin bounds the wait for the answer to BEGIN. When it does not come BEGIN is sent on another
	// connection, up to three times, with twice the time each. With AtBegin the answer comes after that
	// statement: the second and third time it may take as long as any statement.
	begin time.Duration
	// rollback bounds ROLLBACK, which the caller's context does not interrupt. The connection is closed
	// when it is exceeded.
	rollback time.Duration
	// resolve bounds how long it is asked what became of a COMMIT, which the caller's context does not
	// interrupt either.
	resolve time.Duration
}

var defaultBounds = bounds{acquire: 30 * time.Second, begin: 2 * time.Second, rollback: 5 * time.Second, resolve: 10 * time.Second}

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

func checkIsolation(field string, level pgx.TxIsoLevel) error {
	if strength(level) == 0 {
		return fmt.Errorf("txretry: %s: unknown isolation level %q", field, level)
	}
	return nil
}

// strength orders the isolation levels; it is 0 for an unknown one.
func strength(level pgx.TxIsoLevel) int {
	switch level {
	case pgx.ReadUncommitted, pgx.ReadCommitted:
		return 1
	case pgx.RepeatableRead:
		return 2
	case pgx.Serializable:
		return 3
	}
	return 0
}

func checkAttempts(field string, n int) error {
	if n < 1 {
		return fmt.Errorf("txretry: %s is %d, must be at least 1", field, n)
	}
	return nil
}

func checkPositive(field string, d time.Duration) error {
	if d <= 0 {
		return fmt.Errorf("txretry: %s is %v, must be positive", field, d)
	}
	return nil
}

func checkNotNegative(field string, d time.Duration) error {
	if d < 0 {
		return fmt.Errorf("txretry: %s is %v, must not be negative", field, d)
	}
	return nil
}

// checkOptionalTimeout allows a negative value, which sets nothing.
func checkOptionalTimeout(field string, d time.Duration) error {
	if d < 0 {
		return nil
	}
	return checkServerTimeout(field, d)
}

// checkServerTimeout keeps out what the server would round down to 0, which
// there means no timeout at all, and what overflows its 32 bit setting.
func checkServerTimeout(field string, d time.Duration) error {
	if d != 0 && (d < time.Millisecond || d > math.MaxInt32*time.Millisecond) {
		return fmt.Errorf("txretry: %s is %v, must lie between 1ms and %v", field, d, math.MaxInt32*time.Millisecond)
	}
	return nil
}
