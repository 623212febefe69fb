package inbox_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

func TestReplayPause(t *testing.T) {
	t.Parallel()
	for perSecond, want := range map[float64]time.Duration{0: 0, 4: 250 * time.Millisecond} {
		if got := (inbox.Replay{PerSecond: perSecond}).Pause(); got != want {
			t.Errorf("%v per second: pause %v, want %v", perSecond, got, want)
		}
	}
	if got := (inbox.Replay{PerSecond: 1e-300}).Pause(); got < 24*time.Hour {
		t.Errorf("next to nothing per second: pause %v", got)
	}
}
