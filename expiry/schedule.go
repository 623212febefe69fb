package expiry

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/netresearch/go-cron"
)

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
