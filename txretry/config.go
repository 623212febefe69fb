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

// Config configures a [Manager]. The zero value works: SERIALIZABLE, a lock timeout of 8 s and 6
// attempts.
type Config struct {
	// Isolation is the isolation level of every transaction. Default: pgx.Serializable.
	Isolation pgx.TxIsoLevel

	// MaxAttempts is the maximum number of runs of fn per call; 1 means no retry. Default: 6.
	MaxAttempts int

	// LockTimeout is the time limit of each single wait for a lock: SET LOCAL lock_timeout, rounded up to
	// milliseconds. Default: 8 s.
	LockTimeout time.Duration

	// StatementTimeout is the time limit of each statement: SET LOCAL statement_timeout, rounded up to milliseconds.
	// If it is not above LockTimeout, it ends lock waits first, with 57014, which is not retried. Default: the
	// server's setting.
	//
	// If the server is silent, the client closes the connection after StatementTimeout plus one second (at least 2 s).
	// If StatementTimeout is 0, it does so after LockTimeout plus one second (at least 9 s). A statement that takes
	// longer than 9 s therefore needs a StatementTimeout. Negative: the server's setting, and the client waits without
	// limit.
	StatementTimeout time.Duration

	// IdleTimeout is how long a transaction may be open without a statement, because fn does something else or the
	// process has vanished from the network: SET LOCAL idle_in_transaction_session_timeout, rounded up to
	// milliseconds. After that, the server closes the connection and releases the locks. Default: 30 s. Negative: the
	// server's setting.
	IdleTimeout time.Duration

	// BaseDelay and MaxDelay determine the delay after failed attempt n:
	// min(MaxDelay, U(0.5, 1.5) × BaseDelay × 2^n), where U is a random number. With Options.SerialKey
	// it is min(MaxDelay, U(0.5, 1.5) × BaseDelay/50 × 4^n). Default: 50 ms and 1 s.
	BaseDelay, MaxDelay time.Duration

	// RetryBudget is the largest share of attempts that may fail on a lock or a conflict (40001, 40P01, 55P03), from 0 to
	// less than 1. If at least 10 attempts of the last 10 s failed so, and they are more than this share of all, the
	// Manager starts a call only while no other runs. Do returns *LockTimeoutError for the others at once, and has sent
	// nothing for them. This ends when the share is met again, or 10 s after the last such failure.
	//
	// A call that has started keeps its attempts, and does not count as running while it waits between two. One hot row
	// has more commits with Options.SerialKey. A refused caller may try again: see LockTimeoutError.RetryAfter.
	//
	// All calls of the Manager share the budget, and no others. 0.5 means two attempts per call on average. Default: 0,
	// no call is refused. The metric holdfast.txretry.refused counts the refused calls.
	RetryBudget float64

	// XactStatus finds the outcome of a COMMIT whose reply was lost, with the server's pg_xact_status: committed is
	// success, rolled back is retried. This needs the transaction's id, so the begin message of each call that writes
	// ends with SELECT pg_current_xact_id(). This adds no round trip, but some work for the server, and uses an id
	// even if fn writes nothing.
	//
	// If the server has crashed since BEGIN, the outcome stays unknown, because the server may have given the id to
	// another transaction. In two cases the id may belong to another transaction undetected: after a failover that
	// lost transactions, and if the server's clock was set forward after a crash. Use Options.Witness if that must
	// not happen. Default: off, and Do returns *CommitUnknownError.
	XactStatus bool

	// CommitTimeout is the time limit of COMMIT, which the caller's context does not interrupt. After it, the outcome
	// is unknown. Keep it above LockTimeout, because a statement sent together with COMMIT may wait for a lock.
	// Default: one second more than LockTimeout, at least 9 s.
	CommitTimeout time.Duration

	// Rand returns a number from [0, 1) for the delays. It must be safe for concurrent use. Default: math/rand/v2.
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
		checkShare("Config.RetryBudget", c.RetryBudget),
	)
}

// policy returns the backoff policy.
func (c Config) policy() backoff.Policy {
	return backoff.Policy{Base: c.BaseDelay, Factor: 2, Max: c.MaxDelay, Jitter: 0.5}
}

// inTurn returns the backoff policy of a call with a SerialKey. Its delays are shorter: by default from 4 ms, with
// the factor 4, up to the same maximum. Most competing calls wait in the queue behind it, so there are few conflicts
// to avoid, and long delays would delay all of them.
func (c Config) inTurn() backoff.Policy {
	return backoff.Policy{Base: c.BaseDelay / 50, Factor: 4, Max: c.MaxDelay, Jitter: 0.5}
}

// bounds are the time limits of waits for the server that users cannot set. They apply with any context.
type bounds struct {
	// acquire is the time limit for getting a connection.
	acquire time.Duration
	// begin is the time limit for the reply to BEGIN. After it, BEGIN is sent on another connection, at most three
	// times, with twice the time each. With AtBegin, the reply comes after that statement: the second and third time
	// it may take as long as any statement.
	begin time.Duration
	// rollback is the time limit of ROLLBACK, which the caller's context does not interrupt. After it, the connection
	// is closed.
	rollback time.Duration
	// resolve is the time limit for finding the outcome of a COMMIT, which the caller's context does not interrupt
	// either.
	resolve time.Duration
}

var defaultBounds = bounds{acquire: 30 * time.Second, begin: 2 * time.Second, rollback: 5 * time.Second, resolve: 10 * time.Second}

// Options are the settings of one call. A zero field that [Config] has too takes its value from there.
type Options struct {
	// Name is the name of the operation in spans, metrics, logs and errors, such as "seats.hold". Use only a small
	// set of names.
	Name string

	Isolation   pgx.TxIsoLevel // see [Config]
	ReadOnly    bool           // the server rejects writes
	MaxAttempts int            // see [Config]

	LockTimeout, StatementTimeout time.Duration // see [Config]
	IdleTimeout, CommitTimeout    time.Duration // see [Config]

	// NoWait turns off retries of 55P03, for statements such as SELECT … FOR UPDATE NOWAIT, for which an unavailable
	// lock is a result. An expired lock_timeout has the same SQLSTATE, so it is not retried either.
	NoWait bool

	// RetryConstraints also retries unique_violation (23505) and exclusion_violation (23P01). Use it for an fn that
	// reads before it inserts: the next attempt sees the row that the other transaction inserted. If they persist, Do
	// returns the last one unchanged.
	RetryConstraints bool

	// Savepoint allows a call inside the fn of another call on the same database: fn then runs in a savepoint of the
	// running transaction. If fn fails, the savepoint is rolled back and the error returned, and the outer fn
	// continues. Nothing commits before the outer call does. Attempts, timeouts, SerialKey and Witness come from the
	// outer call. Only the outer call retries: its fn should return a transient error. The call returns an error if
	// its Isolation is above the outer call's, or if it is ReadOnly and the outer call is not. Without Savepoint,
	// such a call returns ErrNested.
	Savepoint bool

	// SerialKey names the contended resource, such as "event:42". Calls of this manager with the same key run one
	// after another, first come first served, and wait without holding a connection. A hot row then causes a queue
	// instead of many serialization failures. Retry delays are shorter, because all queued calls wait for the retried
	// one; see Config.BaseDelay. "" does not queue.
	SerialKey string

	// Witness finds the outcome of this call's COMMIT if its reply is lost, with a row that fn has written. It runs
	// in a separate READ COMMITTED transaction, which is always rolled back. Committed is success, and AfterCommit
	// functions run. Not committed is retried while attempts are left. After an error Witness is called again, for at
	// most 10 s; then Do returns *CommitUnknownError. Default: see [Config].XactStatus.
	//
	// A SELECT without a result proves nothing, because the lost transaction may still be committing. Witness should
	// INSERT the row, which waits for the other transaction: a unique violation means committed, success means not
	// committed. This requires that fn ran its own INSERT as a statement, not through [AtCommit], and that the row
	// stays. A message of an outbox is a witness only if published rows are kept. (idempotencypgx.Store resolves its
	// transactions in this way by itself.)
	Witness func(ctx context.Context, tx pgx.Tx) (committed bool, err error)

	// AtBegin is a statement that is sent together with BEGIN, in one round trip, before fn, in every attempt. Its
	// failure counts as a failure of BEGIN: fn is not called, and transient failures are retried. It must not end the
	// transaction. Its Look, if set, runs before BEGIN, outside of the transaction. Optional.
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

// patience is how long the client waits for the reply to a statement: a little longer than the server's own limit for
// lock waits or statements, so that the server replies first. 0 means no limit.
func (o *Options) patience() time.Duration {
	switch {
	case o.StatementTimeout < 0:
		return 0
	case o.StatementTimeout > 0:
		return max(o.StatementTimeout, time.Second) + time.Second
	}
	return max(o.LockTimeout, defaultLockTimeout) + time.Second
}

// first returns the statement that is sent with BEGIN, or nil if there is none.
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

// checkShare rejects NaN, too.
func checkShare(field string, share float64) error {
	if !(share >= 0 && share < 1) {
		return fmt.Errorf("txretry: %s is %v, must be at least 0 and less than 1", field, share)
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

// checkServerTimeout rejects values that the server would round down to 0, which means no timeout there, and values
// that overflow its 32-bit setting.
func checkServerTimeout(field string, d time.Duration) error {
	if d != 0 && (d < time.Millisecond || d > math.MaxInt32*time.Millisecond) {
		return fmt.Errorf("txretry: %s is %v, must lie between 1ms and %v", field, d, math.MaxInt32*time.Millisecond)
	}
	return nil
}
