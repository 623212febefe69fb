package inboxamqp

import (
	"testing"
	"time"
)

// A delay takes a step that is not shorter and at most 1.5 times and 1.5 s longer, or a shorter one and the rest.
func TestCover(t *testing.T) {
	t.Parallel()
	for d := time.Millisecond; d < 48*time.Hour; d += d/50 + time.Millisecond {
		step, rest := cover(d)
		if rest == 0 && (step < d || step > d+d/2+1500*time.Millisecond) || rest > 0 && step+rest != d {
			t.Errorf("%v waits in a step of %v, then for %v", d, step, rest)
		}
	}
	for _, tt := range []struct{ d, step, rest time.Duration }{
		{0, 100 * time.Millisecond, 0},
		{800 * time.Millisecond, time.Second, 0},
		{60 * time.Second, 64 * time.Second, 0},
		{70 * time.Second, 64 * time.Second, 6 * time.Second}, // the next one is two minutes
		{time.Hour, 16 * time.Minute, 44 * time.Minute},
	} {
		if step, rest := cover(tt.d); step != tt.step || rest != tt.rest {
			t.Errorf("%v waits in a step of %v, then for %v", tt.d, step, rest)
		}
	}
}
