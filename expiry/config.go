package expiry

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/netresearch/go-cron"
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

// errSchedule is inside the error of every schedule that is refused.
var errSchedule = errors.New("expiry: SweeperConfig.Schedule")

// schedule says when to sweep, due rows or not.
type schedule interface {
	// Next returns the first activation after t, or the zero time if there is
	// none.
	Next(t time.Time) time.Time
}

// maxExpression bounds what is handed to the cron parser.
const maxExpression = 256

// parseSchedule reads SweeperConfig.Schedule.
func parseSchedule(s string) (schedule, error) {
	s = strings.TrimSpace(s)
	if s == "@never" {
		return never{}, nil
	}
	if zone, ok := strings.CutPrefix(s, "CRON_TZ="); ok {
		return parseZoned(zone)
	}
	interval, ok := strings.CutPrefix(s, "@every ")
	if !ok {
		return parseCron(s)
	}
	d, err := time.ParseDuration(strings.TrimSpace(interval))
	if err != nil || d < time.Second {
		return nil, fmt.Errorf("%w: %.64q: want a duration of at least 1s after @every", errSchedule, s)
	}
	return every(d), nil
}

// parseZoned reads "Europe/Berlin 30 2 * * *".
func parseZoned(s string) (schedule, error) {
	zone, expr, _ := strings.Cut(s, " ")
	if zone == "" {
		return nil, fmt.Errorf("%w: CRON_TZ= wants the name of a time zone behind it", errSchedule)
	}
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errSchedule, err)
	}
	readings, err := parseCron(strings.TrimSpace(expr))
	if err != nil {
		return nil, err
	}
	return zoned{readings, loc}, nil
}

// parseCron reads five fields, or one of the names such as @hourly, in UTC, in which
// every minute comes once. Dates that never come, such as 30 February, are refused.
func parseCron(expr string) (schedule, error) {
	if len(expr) > maxExpression {
		return nil, fmt.Errorf("%w: %d characters are too many", errSchedule, len(expr))
	}
	if strings.Contains(expr, "TZ=") {
		return nil, fmt.Errorf("%w: %.64q: a time zone is given once, as CRON_TZ= before the fields", errSchedule, expr)
	}
	if strings.HasPrefix(expr, "@every") {
		return nil, fmt.Errorf("%w: %.64q is not a cron expression", errSchedule, expr)
	}
	parser, err := cron.TryNewParser(cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor | cron.DowOrDom)
	if err != nil {
		return nil, fmt.Errorf("expiry: cron parser: %w", err)
	}
	parsed, err := parser.Parse(expr)
	if err != nil {
		return nil, fmt.Errorf("%w: %.64q: %w", errSchedule, expr, err)
	}
	if parsed.Next(someDay).IsZero() {
		return nil, fmt.Errorf("%w: %.64q never comes", errSchedule, expr)
	}
	return utc{parsed}, nil
}

// someDay is where the search for an activation starts: just after a leap day,
// so that only an impossible date finds none.
var someDay = time.Date(2024, time.March, 1, 0, 0, 0, 0, time.UTC)

// utc asks the parsed schedule in UTC, whatever the zone of the question.
type utc struct{ cron.Schedule }

func (s utc) Next(t time.Time) time.Time { return s.Schedule.Next(t.UTC()) }

// every comes so long after the last time it was asked for.
type every time.Duration

func (e every) Next(t time.Time) time.Time { return t.Add(time.Duration(e)) }

// never leaves the sweeper to its start, to the next due time and to wake-ups.
type never struct{}

func (never) Next(time.Time) time.Time { return time.Time{} }

// zoned is a schedule by the clocks of a time zone. Each time that the expression
// names comes once a day, also when the clocks change:
//
//   - a time that is left out in spring comes when the clocks jump: 02:30 at
//     03:00, together with whatever else was left out;
//   - a time that comes twice in autumn counts the first time only. So
//     "*/30 * * * *" pauses for the hour that is repeated.
//
// The cron parser is asked for times of day alone, written as if they were UTC, so
// that its own idea of such days does not matter.
type zoned struct {
	readings schedule
	loc      *time.Location
}

func (s zoned) Next(t time.Time) time.Time {
	for r := s.readings.Next(reading(t, s.loc)); !r.IsZero(); r = s.readings.Next(r) {
		if at := firstAt(r, s.loc); at.After(t) {
			return at
		}
	}
	return time.Time{}
}

// reading is what the clocks of loc show at t.
func reading(t time.Time, loc *time.Location) time.Time {
	t = t.In(loc)
	return time.Date(t.Year(), t.Month(), t.Day(), t.Hour(), t.Minute(), t.Second(), t.Nanosecond(), time.UTC)
}

// firstAt is when the clocks of loc first show r, or jump over it.
func firstAt(r time.Time, loc *time.Location) time.Time {
	at := time.Date(r.Year(), r.Month(), r.Day(), r.Hour(), r.Minute(), r.Second(), 0, loc)
	start, end := at.ZoneBounds()
	switch shown := reading(at, loc); {
	case shown.After(r): // counted by the offset from before the jump
		return start
	case shown.Before(r): // by the one behind it
		return end
	case start.IsZero():
		return at
	}
	_, offset := start.Add(-1).Zone()
	if earlier := r.Add(-time.Duration(offset) * time.Second); earlier.Before(start) {
		return earlier.In(loc)
	}
	return at
}
