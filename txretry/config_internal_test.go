package txretry

import (
	"testing"
	"time"
)

// A lock that a statement waits for on its way with COMMIT is reported by the server before COMMIT is given up.
func TestCommitOutlastsLockWaits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		cfg  Config
		call Options
		want time.Duration
	}{
		{want: 9 * time.Second},
		{cfg: Config{LockTimeout: time.Second}, want: 9 * time.Second},
		{cfg: Config{LockTimeout: 20 * time.Second}, want: 21 * time.Second},
		{cfg: Config{LockTimeout: 20 * time.Second}, call: Options{LockTimeout: time.Second}, want: 9 * time.Second},
		{call: Options{LockTimeout: 20 * time.Second}, want: 21 * time.Second},
		{cfg: Config{CommitTimeout: 3 * time.Second}, want: 3 * time.Second},
		{cfg: Config{CommitTimeout: 3 * time.Second}, call: Options{CommitTimeout: 4 * time.Second}, want: 4 * time.Second},
	} {
		cfg := c.cfg.withDefaults()
		if got := c.call.withDefaults(&cfg).CommitTimeout; got != c.want {
			t.Errorf("manager's lock and commit timeouts %v, %v, call's %v, %v: got %v, want %v",
				c.cfg.LockTimeout, c.cfg.CommitTimeout, c.call.LockTimeout, c.call.CommitTimeout, got, c.want)
		}
	}
}
