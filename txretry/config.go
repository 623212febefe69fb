package txretry

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
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
	StatementTimeout time.Duration

	// BaseDelay and MaxDelay shape the delay after failed attempt n:
	// min(MaxDelay, U(0.5, 1.5) × BaseDelay × 2^n). 0 means 50 ms and 1 s.
	BaseDelay, MaxDelay time.Duration

	// CommitTimeout bounds COMMIT, which the caller's context does not interrupt;
	// 0 means 30 s. A COMMIT that runs into it has an unknown outcome.
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

// Options are the settings of one call. Every zero field takes the manager's
// [Config].
type Options struct {
	// Name is the name of the operation in spans, metrics, logs and errors, such
	// as "seats.hold". Keep it to a small set of values.
	Name string

	Isolation   pgx.TxIsoLevel
	ReadOnly    bool
	Deferrable  bool // SERIALIZABLE and ReadOnly only: waits for a safe snapshot
	MaxAttempts int

	LockTimeout, StatementTimeout time.Duration

	// SerialKey names what the call contends for, such as "event:42". The calls
	// of this manager with the same key run one after another, first come first
	// served, and wait without holding a connection: a hot row costs a queue
	// instead of a storm of serialization failures. "" does not queue.
	SerialKey string
}

func (c Config) withDefaults() Config {
	setDefault(&c.Isolation, pgx.Serializable)
	setDefault(&c.MaxAttempts, 6)
	setDefault(&c.LockTimeout, 8*time.Second)
	setDefault(&c.BaseDelay, 50*time.Millisecond)
	setDefault(&c.MaxDelay, time.Second)
	setDefault(&c.CommitTimeout, 30*time.Second)
	setDefault(&c.RollbackTimeout, 5*time.Second)
	if c.Rand == nil {
		c.Rand = rand.Float64
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func (c Config) validate() error {
	errs := []error{
		checkIsolation("Config.Isolation", c.Isolation),
		checkAttempts("Config.MaxAttempts", c.MaxAttempts),
		checkServerTimeout("Config.LockTimeout", c.LockTimeout),
		checkServerTimeout("Config.StatementTimeout", c.StatementTimeout),
		checkPositive("Config.BaseDelay", c.BaseDelay),
		checkPositive("Config.MaxDelay", c.MaxDelay),
		checkPositive("Config.CommitTimeout", c.CommitTimeout),
		checkPositive("Config.RollbackTimeout", c.RollbackTimeout),
	}
	return errors.Join(errs...)
}

// withDefaults fills the zero fields from the manager's Config.
func (o Options) withDefaults(c *Config) Options {
	if o.Isolation == "" {
		o.Isolation = c.Isolation
	}
	if o.MaxAttempts == 0 {
		o.MaxAttempts = c.MaxAttempts
	}
	if o.LockTimeout == 0 {
		o.LockTimeout = c.LockTimeout
	}
	if o.StatementTimeout == 0 {
		o.StatementTimeout = c.StatementTimeout
	}
	return o
}

func (o Options) validate() error {
	err := errors.Join(
		checkIsolation("Options.Isolation", o.Isolation),
		checkAttempts("Options.MaxAttempts", o.MaxAttempts),
		checkServerTimeout("Options.LockTimeout", o.LockTimeout),
		checkServerTimeout("Options.StatementTimeout", o.StatementTimeout),
	)
	if o.Deferrable && (!o.ReadOnly || o.Isolation != pgx.Serializable) {
		err = errors.Join(err, errors.New("txretry: Options.Deferrable needs ReadOnly and isolation serializable"))
	}
	return err
}

func checkIsolation(field string, level pgx.TxIsoLevel) error {
	switch level {
	case pgx.Serializable, pgx.RepeatableRead, pgx.ReadCommitted, pgx.ReadUncommitted:
		return nil
	}
	return fmt.Errorf("txretry: %s: unknown isolation level %q", field, level)
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

// checkServerTimeout keeps out what the server would round down to 0, which
// there means no timeout at all, and what overflows its 32 bit setting.
func checkServerTimeout(field string, d time.Duration) error {
	if d != 0 && (d < time.Millisecond || d > math.MaxInt32*time.Millisecond) {
		return fmt.Errorf("txretry: %s is %v, must lie between 1ms and %v", field, d, math.MaxInt32*time.Millisecond)
	}
	return nil
}
