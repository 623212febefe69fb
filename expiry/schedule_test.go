package expiry_test

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func at(s string) time.Time {
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		panic(err)
	}
	return t
}

func TestParseSchedule(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ expr, from, want string }{
		{"*/30 * * * *", "2026-11-20T10:00:00Z", "2026-11-20T10:30:00Z"},
		{"*/30 * * * *", "2026-11-20T10:29:59Z", "2026-11-20T10:30:00Z"},
		{"*/30 * * * *", "2026-11-20T23:45:00+02:00", "2026-11-20T22:00:00Z"},
		{"15 2 * * *", "2026-03-28T22:00:00-05:00", "2026-03-30T02:15:00Z"},
		{"0 0 29 2 *", "2026-01-01T00:00:00Z", "2028-02-29T00:00:00Z"},
		{"0 0 13 * 5", "2026-11-20T01:00:00Z", "2026-11-27T00:00:00Z"}, // a Friday: either day will do
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
