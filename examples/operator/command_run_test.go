package operator_test

import (
	"testing"
	"time"
)

func TestRelayAndSweep(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all"})
	r.wants(t, 1, []string{"relay", "--limit=1000", "--time-limit=0"}, "published 0")
	r.mended = true
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all"})
	began := time.Now()
	r.wants(t, 0, []string{"relay", "--limit=1000", "--time-limit=5", "--json"}, `"published": 2`)
	if took := time.Since(began); took < 2500*time.Millisecond {
		t.Errorf("a time limit of 5 is over after %v", took)
	}
	r.wants(t, 0, []string{"expiry", "due"}, "holds", "2")
	r.wants(t, 1, []string{"expiry", "stuck", "--after=30"}, "holds", "SWEEP")
	r.wants(t, 1, []string{"expiry", "stuck", "--after=0s", "--limit=1", "--json"}, `"id": "0"`)
	r.wants(t, 0, []string{"expiry", "stuck", "--after=2h"})
	r.wants(t, 0, []string{"sweep", "--dry-run"}, "2")
	r.wants(t, 0, []string{"sweep"}, "expired 2, poisoned 0")
	r.wants(t, 0, []string{"sweep"}, "expired 0")
	r.wants(t, 0, []string{"doctor"}, "all is well")
	r.wants(t, 0, []string{"setup"})
	r.wants(t, 0, []string{"prune"})
}
