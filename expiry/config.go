package expiry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/expiry/driver"
)

// SweeperConfig configures a Sweeper. The zero value works.
type SweeperConfig struct {
	// Name names the sweeper in logs, spans and metrics. Empty means "expiry".
	Name string

	// Schedule is when to sweep even if nothing is known to be due. Nil means
	// DefaultSchedule.
	Schedule Schedule

	// BatchSize is the number of rows per transaction, up to 10,000. 0 means 200.
	BatchSize int

	// BatchTimeout bounds one batch, and one look for the next due time: what is
	// under way when a connection falls silent is lost for that long. Batches after
	// one that ran into it take half as many rows; each that takes less than a
	// quarter of it doubles them again. 0 means 5 s.
	BatchTimeout time.Duration

	// MaxDuration and MaxBatches bound one sweep: beyond them it begins no further
	// batch, but for one of rows that were set aside, and Report.More is true. Run
	// then goes on after MinPause. 0 means no bound.
	MaxDuration time.Duration
	MaxBatches  int

	// MinPause is the shortest time between two sweeps, and between two looks for
	// the next due time. While sweeps get nothing because others hold the rows that
	// are due, it doubles, up to a second. 0 means 100 ms.
	MinPause time.Duration

	// Recheck is how often the next due time is looked up again while nothing
	// happens, so that rows made by other processes are found. 0 means 90 s: an hour
	// in which nothing is due is 40 looks, and two sweeps of DefaultSchedule.
	Recheck time.Duration

	// Quarantine is how long a row that made its batch fail is left alone before
	// it is tried again, by itself. 0 means 5 minutes. The list is kept in memory,
	// per process.
	Quarantine time.Duration

	// MaxQuarantine bounds that list, and how many rows one sweep may put there: it
	// then stops with ErrQuarantineFull, for so many bad rows are more likely one
	// bad program, and the next sweep goes on behind them. Beyond the bound the
	// rows that have been in quarantine longest are tried again early. 0 means
	// 1,000.
	MaxQuarantine int

	// ShutdownTimeout is how long the batch in hand may go on after the context
	// is cancelled. 0 means 10 s.
	ShutdownTimeout time.Duration

	// MaxBackoff bounds the pause after a failed sweep, which starts at half a second
	// and doubles. 0 means 5 s: due rows wait that long once a fault is over.
	MaxBackoff time.Duration

	// Rand returns a number from [0, 1) that spreads those pauses; nil means
	// math/rand/v2.
	Rand func() float64

	Logger         *slog.Logger         // nil means slog.Default()
	TracerProvider trace.TracerProvider // nil means the global one
	MeterProvider  metric.MeterProvider // nil means the global one
	Hooks          Hooks                // optional callbacks
}

// DefaultSchedule is the schedule of a Sweeper that is given none, in UTC.
const DefaultSchedule = "*/30 * * * *"

// Hooks are optional callbacks, called one after the other by the goroutine that
// sweeps. They should return soon.
type Hooks struct {
	// OnBatch is called after every committed batch, with what the sweep has done
	// so far.
	OnBatch func(ctx context.Context, b driver.Batch, soFar Report)
	// OnSweep is called after every sweep. err is what stopped it early.
	OnSweep func(ctx context.Context, r Report, err error)
	// OnPoison is called for a row that made its batch fail and was put in
	// quarantine.
	OnPoison func(ctx context.Context, rowID string, err error)
}

func (c SweeperConfig) withDefaults() SweeperConfig {
	c.Name = cmp.Or(c.Name, "expiry")
	c.BatchSize = cmp.Or(c.BatchSize, 200)
	c.BatchTimeout = cmp.Or(c.BatchTimeout, 5*time.Second)
	c.MinPause = cmp.Or(c.MinPause, 100*time.Millisecond)
	c.Recheck = cmp.Or(c.Recheck, 90*time.Second)
	c.Quarantine = cmp.Or(c.Quarantine, 5*time.Minute)
	c.MaxQuarantine = cmp.Or(c.MaxQuarantine, 1000)
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, 10*time.Second)
	c.MaxBackoff = cmp.Or(c.MaxBackoff, 5*time.Second)
	if c.Rand == nil {
		c.Rand = rand.Float64
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// maxBatch keeps a transaction, and the array of ids it sends, within reason.
const maxBatch = 10_000

func (c SweeperConfig) validate() error {
	var errs []error
	if c.BatchSize < 1 || c.BatchSize > maxBatch {
		errs = append(errs, fmt.Errorf("expiry: SweeperConfig.BatchSize is %d, must lie between 1 and %d", c.BatchSize, maxBatch))
	}
	if c.MaxBatches < 0 {
		errs = append(errs, fmt.Errorf("expiry: SweeperConfig.MaxBatches is %d, must not be negative", c.MaxBatches))
	}
	if c.MaxQuarantine < 1 {
		errs = append(errs, fmt.Errorf("expiry: SweeperConfig.MaxQuarantine is %d, must be positive", c.MaxQuarantine))
	}
	for _, f := range []struct {
		name string
		d    time.Duration
	}{
		{"BatchTimeout", c.BatchTimeout},
		{"MaxDuration", c.MaxDuration},
		{"MinPause", c.MinPause},
		{"Recheck", c.Recheck},
		{"Quarantine", c.Quarantine},
		{"ShutdownTimeout", c.ShutdownTimeout},
		{"MaxBackoff", c.MaxBackoff},
	} {
		if f.d < 0 {
			errs = append(errs, fmt.Errorf("expiry: SweeperConfig.%s is %v, must not be negative", f.name, f.d))
		}
	}
	return errors.Join(errs...)
}
