package expiry

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/netresearch/go-cron"
)

// ErrSchedule is inside every error of Cron, CronIn and ParseSchedule.
var ErrSchedule = errors.New("expiry: bad schedule")

// Schedule says when to sweep, due rows or not. It must be safe for concurrent
// use.
type Schedule interface {
	// Next returns the first activation after t, or the zero time if there is
	// none.
	Next(t time.Time) time.Time
}

// maxExpression bounds what is handed to the cron parser.
const maxExpression = 256

// ParseSchedule reads a schedule from a setting: a cron expression as Cron
// takes it, one for a time zone as in "CRON_TZ=Europe/Berlin 30 2 * * *" (see
// CronIn), "@every 90s" with a duration of at least a second, or "@never".
func ParseSchedule(s string) (Schedule, error) {
	s = strings.TrimSpace(s)
	if s == "@never" {
		return Never(), nil
	}
	if zone, ok := strings.CutPrefix(s, "CRON_TZ="); ok {
		return parseZoned(zone)
	}
	every, ok := strings.CutPrefix(s, "@every ")
	if !ok {
		return Cron(s)
	}
	d, err := time.ParseDuration(strings.TrimSpace(every))
	if err != nil || d < time.Second {
		return nil, fmt.Errorf("%w: %.64q: want a duration of at least 1s after @every", ErrSchedule, s)
	}
	return Every(d), nil
}

// parseZoned reads "Europe/Berlin 30 2 * * *".
func parseZoned(s string) (Schedule, error) {
	zone, expr, _ := strings.Cut(s, " ")
	if zone == "" {
		return nil, fmt.Errorf("%w: CRON_TZ= wants the name of a time zone behind it", ErrSchedule)
	}
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSchedule, err)
	}
	return CronIn(strings.TrimSpace(expr), loc)
}

// Cron reads the five fields minute, hour, day of month, month and day of week,
// or one of @hourly, @daily, @weekly, @monthly, @yearly. Where both days are
// restricted, either will do, as in POSIX. Times are UTC, in which every minute
// comes once. Dates that never come, such as 30 February, are refused.
func Cron(expr string) (Schedule, error) {
	if len(expr) > maxExpression {
		return nil, fmt.Errorf("%w: %d characters are too many", ErrSchedule, len(expr))
	}
	if strings.Contains(expr, "TZ=") {
		return nil, fmt.Errorf("%w: %.64q: a time zone is given as CRON_TZ= to ParseSchedule, or to CronIn", ErrSchedule, expr)
	}
	if strings.HasPrefix(expr, "@every") {
		return nil, fmt.Errorf("%w: %.64q is not a cron expression", ErrSchedule, expr)
	}
	parser, err := cron.TryNewParser(cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor | cron.DowOrDom)
	if err != nil {
		return nil, fmt.Errorf("expiry: cron parser: %w", err)
	}
	parsed, err := parser.Parse(expr)
	if err != nil {
		return nil, fmt.Errorf("%w: %.64q: %w", ErrSchedule, expr, err)
	}
	if parsed.Next(someDay).IsZero() {
		return nil, fmt.Errorf("%w: %.64q never comes", ErrSchedule, expr)
	}
	return utc{parsed}, nil
}

// someDay is where the search for an activation starts: just after a leap day,
// so that only an impossible date finds none.
var someDay = time.Date(2024, time.March, 1, 0, 0, 0, 0, time.UTC)

// utc asks the parsed schedule in UTC, whatever the zone of the question.
type utc struct{ cron.Schedule }

func (s utc) Next(t time.Time) time.Time { return s.Schedule.Next(t.UTC()) }

// Every returns the schedule that comes d after the last time it was asked for.
// Below a second, d counts as a second.
func Every(d time.Duration) Schedule { return every(max(d, time.Second)) }

type every time.Duration

func (e every) Next(t time.Time) time.Time { return t.Add(time.Duration(e)) }

// Never returns the schedule that never comes. A Sweeper with it still sweeps at
// start, at the next due time and after Wake.
func Never() Schedule { return never{} }

type never struct{}

func (never) Next(time.Time) time.Time { return time.Time{} }
