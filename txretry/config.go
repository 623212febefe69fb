package txretry

import (
	"cmp"
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
)

// Config configures a [Manager]. The zero value is usable: SERIALIZABLE, a lock
// timeout of 8 s and 6 attempts.
type Config struct {
	// Isolation of every transaction; "" means pgx.Serializable.
	Isolation pgx.TxIsoLevel

	// MaxAttempts bounds how often fn is run; 0 means 6, 1 means no retry.
	MaxAttempts int

	// LockTimeout is set with SET LOCAL lock_timeout in every attempt, rounded up
	// to milliseconds; 0 means 8 s. It bounds each single wait for a lock.
	LockTimeout time.Duration

	// StatementTimeout is set with SET LOCAL statement_timeout in every attempt,
	// rounded up to milliseconds; 0 leaves the server's setting. A value not above
	// LockTimeout ends lock waits first, with 57014, which is not retried.
	//
	// A server that is silent for a second longer (2 s at least), which its own
	// timeout does not end, is given up: [ErrSilent]. Where StatementTimeout is 0
	// that happens a second after LockTimeout, 9 s at least: a statement that takes
	// longer needs a StatementTimeout. Negative: the server's setting, and it may be
	// silent without end.
	StatementTimeout time.Duration

	// IdleTimeout is set with SET LOCAL idle_in_transaction_session_timeout in
	// every attempt, rounded up to milliseconds; 0 means 30 s, negative leaves the
	// server's setting. When the transaction is idle for longer, because fn does
	// something else or its process has vanished from the network, the server closes
	// the connection and gives up the locks.
	IdleTimeout time.Duration

	// TransactionTimeout is set with SET LOCAL transaction_timeout in every
	// attempt, rounded up to milliseconds; 0 leaves the server's setting. When an
	// attempt takes longer, the server closes the connection. It needs Postgres 17:
	// on an older server Do fails, rather than run without the bound.
	TransactionTimeout time.Duration

	// BaseDelay and MaxDelay shape the delay after failed attempt n:
	// min(MaxDelay, U(0.5, 1.5) × BaseDelay × 2^n). 0 means 50 ms and 1 s.
	BaseDelay, MaxDelay time.Duration

	// Jitter says how the delay is spread; "" means JitterBeforeCap, the formula
	// above.
	Jitter Jitter

	// DeadlineMargin is what an attempt takes beside waiting for locks. If it is
	// set, an attempt, and the delay before it, is not begun when the context's
	// deadline is nearer than that, and an attempt's lock_timeout is lowered to the
	// time left less the margin. 0: only a delay that would outlast the deadline is
	// not begun.
	DeadlineMargin time.Duration

	// RetryBudget bounds the retries of all calls together; zero: no bound.
	RetryBudget RetryBudget

	// Resolver finds out what became of a COMMIT whose answer was lost; zero:
	// nobody asks, and Do returns *CommitUnknownError.
	Resolver Resolver

	// ResolveTimeout bounds how long the Resolver is asked, which the caller's
	// context does not interrupt; 0 means 10 s.
	ResolveTimeout time.Duration

	// AcquireTimeout bounds the wait for a connection; 0 means 30 s.
	AcquireTimeout time.Duration

	// BeginTimeout bounds the wait for the answer to BEGIN; 0 means 2 s. When it
	// does not come BEGIN is sent on another connection, up to three times, with
	// twice the time each. With AtBegin the answer comes after that statement: the
	// second and third time it may take as long as any statement.
	BeginTimeout time.Duration

	// CommitTimeout bounds COMMIT, which the caller's context does not interrupt;
	// 0 means 10 s. A COMMIT that runs into it has an unknown outcome.
	CommitTimeout time.Duration

	// RollbackTimeout bounds ROLLBACK, which the caller's context does not
	// interrupt either; 0 means 5 s. The connection is closed when it is exceeded.
	RollbackTimeout time.Duration

	// Rand returns a number from [0, 1) for the delays; nil means math/rand/v2.
	// It is called from many goroutines.
	Rand func() float64

	Logger         *slog.Logger         // nil means slog.Default()
	TracerProvider trace.TracerProvider // nil means the global one
	MeterProvider  metric.MeterProvider // nil means the global one
	Hooks          Hooks                // optional callbacks
}

const defaultLockTimeout = 8 * time.Second

// Jitter is a way to spread the delays between attempts.
type Jitter string

// The ways to spread delays. U(a, b) is a random number between a and b, n the
// number of failed attempts.
const (
	// JitterBeforeCap: min(MaxDelay, U(0.5, 1.5) × BaseDelay × 2^n). No delay
	// exceeds MaxDelay, and most delays near it are equal to it.
	JitterBeforeCap Jitter = "before cap"

	// JitterAfterCap: U(0.5, 1.5) × min(MaxDelay, BaseDelay × 2^n). Delays stay
	// spread near MaxDelay, and may be half as long again.
	JitterAfterCap Jitter = "after cap"

	// JitterFull: U(0, 1) × min(MaxDelay, BaseDelay × 2^n).
	JitterFull Jitter = "full"
)

func (c Config) withDefaults() Config {
	c.Isolation = cmp.Or(c.Isolation, pgx.Serializable)
	c.MaxAttempts = cmp.Or(c.MaxAttempts, 6)
	c.LockTimeout = cmp.Or(c.LockTimeout, defaultLockTimeout)
	c.IdleTimeout = cmp.Or(c.IdleTimeout, 30*time.Second)
	c.BaseDelay = cmp.Or(c.BaseDelay, 50*time.Millisecond)
	c.MaxDelay = cmp.Or(c.MaxDelay, time.Second)
	c.Jitter = cmp.Or(c.Jitter, JitterBeforeCap)
	c.ResolveTimeout = cmp.Or(c.ResolveTimeout, 10*time.Second)
	c.AcquireTimeout = cmp.Or(c.AcquireTimeout, 30*time.Second)
	c.BeginTimeout = cmp.Or(c.BeginTimeout, 2*time.Second)
	c.CommitTimeout = cmp.Or(c.CommitTimeout, 10*time.Second)
	c.RollbackTimeout = cmp.Or(c.RollbackTimeout, 5*time.Second)
	c.RetryBudget = c.RetryBudget.withDefaults()
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
		checkServerTimeout("Config.TransactionTimeout", c.TransactionTimeout),
		checkPositive("Config.BaseDelay", c.BaseDelay),
		checkPositive("Config.MaxDelay", c.MaxDelay),
		checkJitter(c.Jitter),
		checkMargin("Config.DeadlineMargin", c.DeadlineMargin),
		c.RetryBudget.validate(),
		checkResolver("Config.Resolver", c.Resolver),
		checkPositive("Config.ResolveTimeout", c.ResolveTimeout),
		checkPositive("Config.AcquireTimeout", c.AcquireTimeout),
		checkPositive("Config.BeginTimeout", c.BeginTimeout),
		checkPositive("Config.CommitTimeout", c.CommitTimeout),
		checkPositive("Config.RollbackTimeout", c.RollbackTimeout),
	)
}

// policy returns how the delays grow and spread.
func (c Config) policy() backoff.Policy {
	return backoff.Policy{
		Base: c.BaseDelay, Factor: 2, Max: c.MaxDelay, Jitter: 0.5,
		JitterAfterCap: c.Jitter == JitterAfterCap,
		Full:           c.Jitter == JitterFull,
	}
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

func checkMargin(field string, d time.Duration) error {
	if d < 0 {
		return fmt.Errorf("txretry: %s is %v, must not be negative", field, d)
	}
	return nil
}

func checkJitter(j Jitter) error {
	switch j {
	case JitterBeforeCap, JitterAfterCap, JitterFull:
		return nil
	}
	return fmt.Errorf("txretry: Config.Jitter: unknown jitter %q", j)
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
