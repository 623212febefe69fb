package expiry

import "time"

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
