package ratelimit_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// Whatever a store holds, a wait can be rounded up to whole seconds.
func TestWaitBeyondAllMeasure(t *testing.T) {
	t.Parallel()
	charges, err := ratelimit.Normalize([]ratelimit.Charge{{Limit: tenPerSecond}})
	if err != nil {
		t.Fatal(err)
	}
	d := ratelimit.Decide(time.Now(), 0, true, charges, []ratelimit.Counter{{Cur: 1 << 53}})
	if d.Allowed || d.RetryAfter+time.Second < 0 || d.Limits()[0].Reset+time.Second < 0 {
		t.Errorf("got %+v", d)
	}
}
