package txretry

import (
	"testing"
	"time"
)

// A lock that a statement waits for on its way with COMMIT is reported by the server before COMMIT is given up.
func TestCommitOutlastsLockWaits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		given Config
		want  time.Duration
	}{
		{Config{}, 9 * time.Second},
		{Config{LockTimeout: time.Second}, 9 * time.Second},
		{Config{LockTimeout: 20 * time.Second}, 21 * time.Second},
		{Config{CommitTimeout: 3 * time.Second}, 3 * time.Second},
	} {
		if got := c.given.withDefaults().CommitTimeout; got != c.want {
			t.Errorf("lock timeout %v, commit timeout %v: %v, want %v", c.given.LockTimeout, c.given.CommitTimeout, got, c.want)
		}
	}
}
