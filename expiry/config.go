package expiry

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// SweeperConfig configures a Sweeper. The zero value works.
type SweeperConfig struct {
	// Name names the sweeper in logs, spans and metrics. Default: "expiry".
	Name string

	// Schedule says when to sweep even if nothing is known to be due:
	//
	//   - five cron fields, minute, hour, day of month, month and day of week, or
	//     one of @hourly, @daily, @weekly, @monthly and @yearly, in UTC. Where both
	//     days are restricted, either will do, as in POSIX;
	//   - the same by the clocks of a time zone, as in
	//     "CRON_TZ=Europe/Berlin 30 2 * * *";
	//   - "@every 90s", a duration of at least a second;
	//   - "@never": sweeps at the start and when rows fall due, and at no other time.
	//
	// By the clocks of a zone each time comes once a day: one that is left out in
	// spring comes when the clocks jump, one that is repeated in autumn counts the
	// first time only. Default: "*/30 * * * *".
	Schedule string

	// BatchSize is the number of rows per transaction, up to 10,000. Default: 200.
	BatchSize int

	// BatchTimeout bounds one batch, and one look for the next due time. It is what a
	// connection that falls silent costs. Batches after one that ran into it take half
	// as many rows; each that takes less than a quarter of it doubles them again.
	// Above 9 s, after which txretry gives up a silent server, a row whose statement hangs
	// counts as an outage, and all rows wait. Default: 5 s.
	BatchTimeout time.Duration

	// PollInterval is how often the next due time is looked up while nothing
	// happens. It is how late a row may expire whose wake-up was lost. An hour in
	// which nothing is due is 40 looks, and two sweeps of the default schedule.
	// Default, and the most: 90 s.
	PollInterval time.Duration

	// Quarantine is how long a row that made its batch fail is left alone before
	// it is tried again, by itself. Up to 1,000 such rows are remembered, in memory,
	// per process. Default: 5 minutes.
	Quarantine time.Duration

	// ShutdownTimeout is how long the batch in hand may go on after the context
	// is cancelled. Default: 10 s.
	ShutdownTimeout time.Duration

	// Rand returns a number from [0, 1) that spreads the pauses after failures.
	// Default: math/rand/v2.
	Rand func() float64

	Logger         *slog.Logger         // Default: slog.Default().
	TracerProvider trace.TracerProvider // Default: the global one.
	MeterProvider  metric.MeterProvider // Default: the global one.
}

func (c SweeperConfig) withDefaults() SweeperConfig {
	c.Name = cmp.Or(c.Name, "expiry")
	c.Schedule = cmp.Or(c.Schedule, defaultSchedule)
	c.BatchSize = cmp.Or(c.BatchSize, 200)
	c.BatchTimeout = cmp.Or(c.BatchTimeout, 5*time.Second)
	c.PollInterval = cmp.Or(c.PollInterval, maxPollInterval)
	c.Quarantine = cmp.Or(c.Quarantine, 5*time.Minute)
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, 10*time.Second)
	if c.Rand == nil {
		c.Rand = rand.Float64
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

const (
	defaultSchedule = "*/30 * * * *"
	// maxBatch keeps a transaction, and the array of ids it sends, within reason.
	maxBatch = 10_000
	// maxPollInterval bounds the poll: stores do not announce deadlines that are so far
	// away that every sweeper finds them in time by itself.
	maxPollInterval = 90 * time.Second
)

func (c SweeperConfig) validate() error {
	var errs []error
	if c.BatchSize < 1 || c.BatchSize > maxBatch {
		errs = append(errs, fmt.Errorf("expiry: SweeperConfig.BatchSize is %d, must lie between 1 and %d", c.BatchSize, maxBatch))
	}
	if c.PollInterval > maxPollInterval {
		errs = append(errs, fmt.Errorf("expiry: SweeperConfig.PollInterval is %v, must be at most %v", c.PollInterval, maxPollInterval))
	}
	for _, f := range []struct {
		name string
		d    time.Duration
	}{
		{"BatchTimeout", c.BatchTimeout},
		{"PollInterval", c.PollInterval},
		{"Quarantine", c.Quarantine},
		{"ShutdownTimeout", c.ShutdownTimeout},
	} {
		if f.d < 0 {
			errs = append(errs, fmt.Errorf("expiry: SweeperConfig.%s is %v, must not be negative", f.name, f.d))
		}
	}
	return errors.Join(errs...)
}

// tuning holds what is not a setting. Tests use smaller figures.
type tuning struct {
	// minPause is the shortest time between two sweeps, and between two looks. While
	// sweeps get nothing because others hold the rows that are due, it doubles, up to
	// longestRest.
	minPause time.Duration
	// maxQuarantine bounds the rows in quarantine, and how many one sweep puts there.
	// So many bad rows are more likely one bad program: the sweep stops with
	// errQuarantineFull, and the next goes on behind them. The rows that have been
	// there longest are then tried again early.
	maxQuarantine int
	// maxBackoff bounds the pause after a failed sweep, which starts at half a second
	// and doubles. Due rows wait that long once a fault is over.
	maxBackoff time.Duration
}

var defaultTuning = tuning{minPause: 100 * time.Millisecond, maxQuarantine: 1000, maxBackoff: 5 * time.Second}
