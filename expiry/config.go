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
	// Name is the name of the sweeper in logs, spans and metrics. Default: "expiry".
	Name string

	// Schedule sets times for sweeps even if no row is known to be due:
	//
	//   - five cron fields (minute, hour, day of month, month and day of week) or one of @hourly, @daily, @weekly,
	//     @monthly and @yearly, in UTC. If both days are restricted, either one is enough, as in POSIX;
	//   - the same in a time zone, as in "CRON_TZ=Europe/Berlin 30 2 * * *";
	//   - "@every 90s", a duration of at least a second;
	//   - "@never": sweeps only at the start and when rows fall due.
	//
	// In a time zone each time comes once a day. A time that is skipped in spring comes when the clocks change. A
	// time that is repeated in autumn counts only the first time. Default: "*/30 * * * *".
	Schedule string

	// BatchSize is the number of rows per transaction, up to 10,000. Default: 200.
	BatchSize int

	// BatchTimeout limits one batch, and one query for the next due time. It is the cost of a connection that falls
	// silent. After a batch that exceeded it, batches take half as many rows; each batch that takes less than a
	// quarter of it doubles the number again. Above 9 s, the time after which txretry gives up a silent server, a row
	// whose statement hangs counts as an outage, and all rows wait. Default: 5 s.
	BatchTimeout time.Duration

	// PollInterval is the time between queries for the next due time while nothing happens. A row whose wake-up was
	// lost expires up to that much late. An hour without due rows costs 40 queries, and two sweeps of the default
	// schedule. Default and maximum: 90 s.
	PollInterval time.Duration

	// Quarantine is how long a row that made its batch fail is skipped before it is tried again, alone. Each process
	// remembers up to 1,000 such rows, in memory. Default: 5 minutes.
	Quarantine time.Duration

	// ShutdownTimeout is how long the running batch may continue after the context is cancelled. Default: 10 s.
	ShutdownTimeout time.Duration

	// Rand returns a number from [0, 1) that randomizes the pauses after failures. Default: math/rand/v2.
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
	// maxBatch limits the size of a transaction and of the id array that it sends.
	maxBatch = 10_000
	// maxPollInterval is the maximum of PollInterval. Stores do not announce later deadlines, because every sweeper
	// finds them in time by polling.
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

// tuning holds values that are not settings. Tests use smaller ones.
type tuning struct {
	// minPause is the shortest time between two sweeps, and between two queries. While sweeps get nothing because
	// others hold the due rows, it doubles, up to longestRest.
	minPause time.Duration
	// maxQuarantine limits the rows in quarantine, and the rows that one sweep adds. More bad rows probably have one
	// common cause: the sweep stops with errQuarantineFull, and the next sweep continues behind them. The rows that
	// have been in quarantine longest are then tried again early.
	maxQuarantine int
	// maxBackoff limits the pause after a failed sweep, which starts at half a second and doubles. After a fault due
	// rows wait at most that long.
	maxBackoff time.Duration
}

var defaultTuning = tuning{minPause: 100 * time.Millisecond, maxQuarantine: 1000, maxBackoff: 5 * time.Second}

// errSchedule is in the error of every rejected schedule.
var errSchedule = errors.New("expiry: SweeperConfig.Schedule")

// schedule returns the times of sweeps that happen without due rows.
type schedule interface {
	// Next returns the first activation after t, or the zero time if there is
	// none.
	Next(t time.Time) time.Time
}

// maxExpression limits the text for the cron parser.
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
		return nil, fmt.Errorf("%w: CRON_TZ= needs the name of a time zone", errSchedule)
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

// parseCron reads five fields, or a name such as @hourly, in UTC, where every minute comes once. Dates that never
// come, such as 30 February, are rejected.
func parseCron(expr string) (schedule, error) {
	if len(expr) > maxExpression {
		return nil, fmt.Errorf("%w: %d characters, at most %d allowed", errSchedule, len(expr), maxExpression)
	}
	if strings.Contains(expr, "TZ=") {
		return nil, fmt.Errorf("%w: %.64q: set the time zone once, as CRON_TZ= before the fields", errSchedule, expr)
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

// someDay is where the search for an activation starts: just after a leap day, so that only an impossible date finds
// none.
var someDay = time.Date(2024, time.March, 1, 0, 0, 0, 0, time.UTC)

// utc is a parsed schedule in UTC, whatever the zone of t.
type utc struct{ cron.Schedule }

func (s utc) Next(t time.Time) time.Time { return s.Schedule.Next(t.UTC()) }

// every comes that long after t.
type every time.Duration

func (e every) Next(t time.Time) time.Time { return t.Add(time.Duration(e)) }

// never has no times: the sweeper sweeps only at its start, when rows fall due, and after wake-ups.
type never struct{}

func (never) Next(time.Time) time.Time { return time.Time{} }

// zoned is a schedule in a time zone. Each time of the expression comes once a day, even when the clocks change:
//
//   - a time that is skipped in spring comes when the clocks change: 02:30 at 03:00, together with all other skipped
//     times;
//   - a time that comes twice in autumn counts only the first time. So "*/30 * * * *" pauses for the repeated hour.
//
// The cron parser only computes times of day, written as if in UTC, so that its own handling of such days does not
// matter.
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

// reading returns the time that the clocks of loc show at t, as if in UTC.
func reading(t time.Time, loc *time.Location) time.Time {
	t = t.In(loc)
	return time.Date(t.Year(), t.Month(), t.Day(), t.Hour(), t.Minute(), t.Second(), t.Nanosecond(), time.UTC)
}

// firstAt returns when the clocks of loc first show r, or skip it.
func firstAt(r time.Time, loc *time.Location) time.Time {
	at := time.Date(r.Year(), r.Month(), r.Day(), r.Hour(), r.Minute(), r.Second(), 0, loc)
	start, end := at.ZoneBounds()
	switch shown := reading(at, loc); {
	case shown.After(r): // time.Date used the offset from before the change
		return start
	case shown.Before(r): // time.Date used the offset from after the change
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
