package driver_test

import (
	"os"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// Whatever a store holds, a wait can be rounded up to whole seconds.
func TestWaitBeyondAllMeasure(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Limit{Name: "calls", Max: 10, Window: time.Second, Algorithm: ratelimit.TokenBucket, Burst: 1}
	charges, err := ratelimit.Charges{{Limit: limit}}.Normalize()
	if err != nil {
		t.Fatal(err)
	}
	var d ratelimit.Decision
	d.Decide(time.Now(), 0, true, charges, []driver.Counter{{Cur: 1 << 53}})
	if d.Allowed || d.RetryAfter+time.Second < 0 || d.Limits()[0].Reset+time.Second < 0 {
		t.Errorf("got %+v", d)
	}
}

// A decision that is made once more about the same limits is made anew.
func TestDecideOnceMore(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1_700_000_000_000)
	one := ratelimit.Charges{{Limit: ratelimit.Limit{Name: "user", Max: 1}, Key: "ann"}}
	other := ratelimit.Charges{{Limit: ratelimit.Limit{Name: "user", Max: 2}, Key: "bob", Cost: 2}}
	var d ratelimit.Decision
	for _, charges := range []ratelimit.Charges{one, one, other, one} {
		charges, err := charges.Normalize()
		if err != nil {
			t.Fatal(err)
		}
		counters := make([]driver.Counter, 1)
		for n := range 2 {
			d.Fallback, d.Cached = true, true
			d.Decide(at, 0, true, charges, counters)
			if d.Allowed != (n == 0) || (d.Denied == "") != d.Allowed || (d.RetryAfter == 0) != d.Allowed || d.Fallback || d.Cached ||
				len(d.Charges()) != 1-n || d.Limits()[0].Max != charges[0].Limit.Max || d.Counters()[0] != counters[0] || counters[0].Cur != charges[0].Cost {
				t.Errorf("%+v, time %d: got %+v with %+v", charges, n, d, counters)
			}
		}
		if charges := d.Charges(); charges != nil {
			t.Errorf("a denial took %+v", charges)
		}
	}
}
