package expiry_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
)

func TestParseSchedule(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ expr, from, want string }{
		{"*/30 * * * *", "2026-11-20T10:00:00Z", "2026-11-20T10:30:00Z"},
		{"*/30 * * * *", "2026-11-20T10:29:59Z", "2026-11-20T10:30:00Z"},
		{"*/30 * * * *", "2026-11-20T23:45:00+02:00", "2026-11-20T22:00:00Z"},
		{"15 2 * * *", "2026-03-28T22:00:00-05:00", "2026-03-30T02:15:00Z"},
		{"0 0 29 2 *", "2026-01-01T00:00:00Z", "2028-02-29T00:00:00Z"},
		{"0 0 13 * 5", "2026-11-20T01:00:00Z", "2026-11-27T00:00:00Z"}, // a Friday: either day is enough
		{"CRON_TZ=Europe/Berlin  30 2 * * *", "2026-06-01T00:00:00Z", "2026-06-01T00:30:00Z"},
		{"@hourly", "2026-11-20T10:15:00Z", "2026-11-20T11:00:00Z"},
		{"@every 1s", "2026-11-20T10:15:00Z", "2026-11-20T10:15:01Z"},
		{" @every 90s ", "2026-11-20T10:15:00Z", "2026-11-20T10:16:30Z"},
	} {
		s, err := expiry.ParseSchedule(tc.expr)
		if err != nil {
			t.Errorf("%q: %v", tc.expr, err)
			continue
		}
		if got := s.Next(at(tc.from)); !got.Equal(at(tc.want)) {
			t.Errorf("%q after %s comes at %s, want %s", tc.expr, tc.from, got.Format(time.RFC3339), tc.want)
		}
	}
	if s, err := expiry.ParseSchedule("@never"); err != nil || !s.Next(time.Now()).IsZero() {
		t.Errorf("@never: %v", err)
	}
}

func TestBadSchedules(t *testing.T) {
	t.Parallel()
	for _, expr := range []string{
		"", "x", "* * * *", "* * * * * *", "60 * * * *", "*/0 * * * *", "0 0 30 2 *", "0 0 31 2 *", "0 0 31 4,6 *",
		"TZ=Europe/Berlin * * * * *", "CRON_TZ=Europe/Nowhere * * * * *", "CRON_TZ= * * * * *", "CRON_TZ=UTC", "CRON_TZ=UTC 0 0 30 2 *",
		"CRON_TZ=../etc/passwd * * * * *", "CRON_TZ=UTC CRON_TZ=UTC * * * * *", "TZ=", "@every", "@every 0s", "@every -1m",
		"@every 10ms", "@every never", "@reboot", "@every 1", "CRON_TZ=UTC @every 1h", "CRON_TZ=UTC @never", strings.Repeat("1,", 300) + " * * * *",
	} {
		if _, err := expiry.ParseSchedule(expr); !errors.Is(err, expiry.ErrSchedule) {
			t.Errorf("%.40q: got %v, want ErrSchedule", expr, err)
		}
	}
}

func FuzzParseSchedule(f *testing.F) {
	for _, seed := range []string{"*/30 * * * *", "@every 1s", "@never", "TZ=", "CRON_TZ=Europe/Berlin 30 2 * * *", "0 0 30 2 *", "1-5/2,7 * ? JAN-MAR MON#2", "0 0 L * *"} {
		f.Add(seed)
	}
	from := at("2026-11-20T10:00:00Z")
	f.Fuzz(func(t *testing.T, expr string) {
		s, err := expiry.ParseSchedule(expr)
		if err != nil {
			return
		}
		if next := s.Next(from); !next.IsZero() && !next.After(from) {
			t.Errorf("%q comes at %v, not after %v", expr, next, from)
		}
	})
}

func location(t *testing.T, name string) *time.Location {
	t.Helper()
	loc, err := time.LoadLocation(name)
	must(t, err)
	return loc
}

// Every time of the expression comes once a day, even when the clocks change. A skipped time comes at the change, a
// repeated time only once.
func TestTimesOfDayWhenTheClocksChange(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		zone, expr, from string
		want             []string
	}{
		{"Europe/Berlin", "30 2 * * *", "2026-03-28T12:00:00+01:00", []string{"2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"}},
		{"Europe/Berlin", "*/30 1-3 * * *", "2026-03-29T01:00:00+01:00", []string{
			"2026-03-29T01:30:00+01:00", "2026-03-29T03:00:00+02:00", "2026-03-29T03:30:00+02:00", "2026-03-30T01:00:00+02:00",
		}},
		{"Europe/Berlin", "30 2 * * *", "2026-10-24T12:00:00+02:00", []string{"2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"}},
		{"Europe/Berlin", "*/30 * * * *", "2026-10-25T01:45:00+02:00", []string{
			"2026-10-25T02:00:00+02:00", "2026-10-25T02:30:00+02:00", "2026-10-25T03:00:00+01:00",
		}},
		{"Europe/Berlin", "15 2 * * *", "2026-10-25T02:10:00+01:00", []string{"2026-10-26T02:15:00+01:00"}}, // from within the repeated hour
		{"America/New_York", "30 2 * * *", "2026-03-07T12:00:00-05:00", []string{"2026-03-08T03:00:00-04:00", "2026-03-09T02:30:00-04:00"}},
		{"America/New_York", "30 1 * * *", "2026-10-31T12:00:00-04:00", []string{"2026-11-01T01:30:00-04:00", "2026-11-02T01:30:00-05:00"}},
		{"America/New_York", "0 2 * * *", "2026-10-31T12:00:00-04:00", []string{"2026-11-01T02:00:00-05:00", "2026-11-02T02:00:00-05:00"}},
		{"Australia/Lord_Howe", "15 2 * * *", "2026-10-03T12:00:00+10:30", []string{"2026-10-04T02:30:00+11:00", "2026-10-05T02:15:00+11:00"}},
		{"Australia/Lord_Howe", "45 1 * * *", "2026-04-04T12:00:00+11:00", []string{"2026-04-05T01:45:00+11:00", "2026-04-06T01:45:00+10:30"}},
		{"Australia/Lord_Howe", "*/15 1-2 * * *", "2026-10-04T01:30:00+10:30", []string{ // two skipped times, both at the change
			"2026-10-04T01:45:00+10:30", "2026-10-04T02:30:00+11:00", "2026-10-04T02:45:00+11:00", "2026-10-05T01:00:00+11:00",
		}},
		{"Australia/Lord_Howe", "*/15 1-2 * * *", "2026-04-05T01:30:00+11:00", []string{ // half an hour is repeated
			"2026-04-05T01:45:00+11:00", "2026-04-05T02:00:00+10:30", "2026-04-05T02:15:00+10:30",
		}},
		{"Asia/Beirut", "0 0 * * *", "2026-03-28T12:00:00+02:00", []string{"2026-03-29T01:00:00+03:00", "2026-03-30T00:00:00+03:00"}}, // no midnight
		{"Asia/Beirut", "30 23 * * *", "2026-10-24T12:00:00+03:00", []string{"2026-10-24T23:30:00+03:00", "2026-10-25T23:30:00+02:00"}},
		{"Asia/Beirut", "0 0 * * *", "2026-10-24T12:00:00+03:00", []string{"2026-10-25T00:00:00+02:00", "2026-10-26T00:00:00+02:00"}}, // from midnight back to 23:00
		{"Asia/Beirut", "30 0 * * *", "2026-03-28T12:00:00+02:00", []string{"2026-03-29T01:00:00+03:00", "2026-03-30T00:30:00+03:00"}},
		{"Pacific/Apia", "0 12 * * *", "2011-12-29T13:00:00-10:00", []string{"2011-12-31T00:00:00+14:00", "2011-12-31T12:00:00+14:00"}}, // a skipped day
		{"UTC", "30 2 * * *", "2026-03-28T12:00:00Z", []string{"2026-03-29T02:30:00Z"}},
	} {
		s, err := expiry.ParseSchedule("CRON_TZ=" + tc.zone + " " + tc.expr)
		must(t, err)
		next := at(tc.from)
		for _, want := range tc.want {
			if next = s.Next(next); !next.Equal(at(want)) {
				t.Errorf("%s, %q from %s comes at %s, want %s", tc.zone, tc.expr, tc.from, next.Format(time.RFC3339), want)
				break
			}
		}
	}
}

// In a whole year each day has one activation, however often the zone changes its clocks.
func TestDailyComesOnceADay(t *testing.T) {
	t.Parallel()
	for _, zone := range []string{"Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Beirut", "America/Havana", "Africa/Casablanca"} {
		loc := location(t, zone)
		for _, expr := range []string{"0 0 * * *", "15 0 * * *", "15 1 * * *", "0 2 * * *", "15 2 * * *", "30 2 * * *", "59 23 * * *"} {
			s, err := expiry.ParseSchedule("CRON_TZ=" + zone + " " + expr)
			must(t, err)
			days := map[string]int{}
			end := time.Date(2027, time.January, 1, 0, 0, 0, 0, loc)
			for next := s.Next(time.Date(2025, time.December, 31, 23, 59, 59, 0, loc)); next.Before(end); next = s.Next(next) {
				days[next.In(loc).Format(time.DateOnly)]++
			}
			for day, n := range days {
				if n != 1 {
					t.Errorf("%s, %q came %d times on %s", zone, expr, n, day)
				}
			}
			if len(days) != 365 {
				t.Errorf("%s, %q came on %d days of 365", zone, expr, len(days))
			}
		}
	}
}
