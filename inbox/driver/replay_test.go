package driver_test

import (
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// A message whose id is derived by its consumer may have been processed as well as any other.
func TestReplayRefuses(t *testing.T) {
	t.Parallel()
	now := time.Now()
	old := now.Add(-9 * 24 * time.Hour)
	for name, tc := range map[string]struct {
		id     uuid.UUID
		failed time.Time
		want   bool
	}{
		"fresh":                            {ids.Deterministic(now, "a"), now, false},
		"old":                              {ids.Deterministic(old, "a"), now, true},
		"no id, fresh":                     {uuid.Nil, now, false},
		"no id, failed long ago":           {uuid.Nil, old, true},
		"of version 4, failed long ago":    {uuid.MustParse("9d1a1a0e-3a68-4f8c-9a3e-0d1a3c0f6a11"), old, true},
		"no id, and nobody knows how long": {uuid.Nil, time.Time{}, false},
	} {
		d := inbox.DeadLetter{Message: inbox.Message{ID: tc.id}, FirstFailedAt: tc.failed}
		if got := driver.Outlived(inbox.Replay{}, d, driver.DefaultRetention, now); got != tc.want {
			t.Errorf("%s: refused %v", name, got)
		}
		if driver.Outlived(inbox.Replay{Force: true}, d, driver.DefaultRetention, now) {
			t.Errorf("%s: refused by force", name)
		}
	}
}

func TestReplayPause(t *testing.T) {
	t.Parallel()
	for perSecond, want := range map[float64]time.Duration{0: 0, 4: 250 * time.Millisecond} {
		if got := driver.Pause(inbox.Replay{PerSecond: perSecond}); got != want {
			t.Errorf("%v per second: pause %v, want %v", perSecond, got, want)
		}
	}
	if got := driver.Pause(inbox.Replay{PerSecond: 1e-300}); got < 24*time.Hour {
		t.Errorf("next to nothing per second: pause %v", got)
	}
}
