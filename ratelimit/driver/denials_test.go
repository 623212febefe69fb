package driver_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
)

var global = ratelimit.Limit{Name: "global", Max: 1000}

func newMemory(t *testing.T) *ratelimit.Memory {
	t.Helper()
	m, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func find(cache *driver.DenyCache, charges []ratelimit.Charge) (d ratelimit.Decision, found bool) {
	found = cache.Find(charges, &d)
	return d, found
}

func TestDenyCache(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, cache := newMemory(t), driver.NewDenyCache(1000)
		one := ratelimit.Limit{Name: "user", Max: 1}
		c := ratelimit.Charge{Limit: one, Key: "ann"}
		all := ratelimit.Charge{Limit: global}
		ask := func() ratelimit.Decision {
			t.Helper()
			asked := time.Now()
			d, err := m.Allow(t.Context(), c, all)
			if err != nil {
				t.Fatal(err)
			}
			cache.Keep(asked, []ratelimit.Charge{c, all}, d)
			return d
		}
		time.Sleep(10 * time.Millisecond)
		ask()
		if _, found := find(cache, []ratelimit.Charge{c, all}); found {
			t.Fatal("remembers what was allowed")
		}
		told := ask()
		for _, moment := range []time.Duration{0, 300 * time.Millisecond, 699 * time.Millisecond} {
			time.Sleep(moment)
			d, found := find(cache, []ratelimit.Charge{all, c})
			if !found || d.Allowed || !d.Cached || d.Denied != "user" || !d.At.Add(d.RetryAfter).Equal(told.At.Add(told.RetryAfter)) {
				t.Fatalf("after %v: got %+v, want until %v", moment, d, told.At.Add(told.RetryAfter))
			}
			if s := d.Limits(); len(s) != 1 || s[0].Remaining != 0 || s[0].Reset != d.RetryAfter {
				t.Errorf("after %v: the state is %+v", moment, s)
			}
		}
		for name, other := range map[string]ratelimit.Charge{
			"a raised limit": {Limit: ratelimit.Limit{Name: "user", Max: 2}, Key: "ann"},
			"another cost":   {Limit: one, Key: "ann", Cost: 2},
			"another key":    {Limit: one, Key: "bob"},
			"another limit":  all,
			"no valid cost":  {Limit: one, Key: "ann", Cost: -1},
		} {
			if _, found := find(cache, []ratelimit.Charge{other}); found {
				t.Errorf("denies %s", name)
			}
		}
		time.Sleep(time.Millisecond)
		if _, found := find(cache, []ratelimit.Charge{c}); found {
			t.Error("denies without a look for more than a second")
		}
		time.Sleep(time.Until(told.At.Add(told.RetryAfter)) - time.Millisecond)
		ask()
		if _, found := find(cache, []ratelimit.Charge{c}); !found {
			t.Error("forgot 1 ms too early")
		}
		time.Sleep(time.Millisecond)
		if _, found := find(cache, []ratelimit.Charge{c}); found || !ask().Allowed {
			t.Error("denies at the time named")
		}

		ask()
		cache.Forget([]ratelimit.Charge{c})
		if _, found := find(cache, []ratelimit.Charge{c}); found {
			t.Error("remembers what was given back")
		}
	})
}

func TestDenyCacheIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, cache := newMemory(t), driver.NewDenyCache(640)
		for n := range 10_000 {
			key := fmt.Sprint(n)
			if n%100 == 0 {
				key += strings.Repeat("x", 10_000)
			}
			c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 1}, Key: key}
			for range 2 {
				asked := time.Now()
				d, err := m.Allow(t.Context(), c)
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Microsecond)
				cache.Keep(asked, []ratelimit.Charge{c}, d)
			}
			if _, found := find(cache, []ratelimit.Charge{c}); !found {
				t.Fatalf("key %.10s is not remembered", key)
			}
		}
		if n := cache.Len(); n > 640 || n < 320 {
			t.Errorf("%d are remembered, want at most 640", n)
		}
	})
}

func TestDenyCacheAllocatesNothing(t *testing.T) {
	m, cache := newMemory(t), driver.NewDenyCache(64)
	charges := []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "user", Max: 1}, Key: "ann"}, {Limit: global}}
	for range 2 {
		asked := time.Now()
		d, err := m.Allow(t.Context(), charges...)
		if err != nil {
			t.Fatal(err)
		}
		cache.Keep(asked, charges, d)
	}
	if n := testing.AllocsPerRun(100, func() { find(cache, charges) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A cached denial of several limits reports all of them, each with its current state.
func TestDenyCacheOfSeveralLimits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, cache := newMemory(t), driver.NewDenyCache(640)
		time.Sleep(800 * time.Millisecond) // into the window
		long := strings.Repeat("ann", 50)
		charges := []ratelimit.Charge{
			{Limit: ratelimit.Limit{Name: "fixed", Max: 1, Window: time.Second, Algorithm: ratelimit.FixedWindow}, Key: "a:b"},
			{Limit: global},
			{Limit: ratelimit.Limit{Name: "bucket", Max: 3, Algorithm: ratelimit.TokenBucket, Burst: 2}, Key: long, Cost: 2},
			{Limit: ratelimit.Limit{Name: "sliding", Max: 2, Window: time.Second}, Cost: 2},
		}
		for range 2 {
			asked := time.Now()
			d, err := m.Allow(t.Context(), charges...)
			if err != nil {
				t.Fatal(err)
			}
			cache.Keep(asked, charges, d)
		}
		for _, passed := range []time.Duration{0, 100 * time.Millisecond, 150 * time.Millisecond, 400 * time.Millisecond} {
			time.Sleep(passed)
			want, err := m.Peek(t.Context(), charges...)
			if err != nil {
				t.Fatal(err)
			}
			d, found := find(cache, charges)
			if !found || !d.Cached || d.Denied != want.Denied || d.RetryAfter != want.RetryAfter || !d.At.Equal(want.At) {
				t.Fatalf("after %v: got %+v, %v, want %+v", passed, d, found, want)
			}
			for _, s := range d.Limits() {
				if i := slices.Index(want.Limits(), s); i < 0 {
					t.Errorf("after %v: got %+v, want one of %+v", passed, s, want.Limits())
				}
			}
		}
		cache.Forget(charges[2:3])
		if d, _ := find(cache, charges[2:]); d.Denied == "bucket" {
			t.Error("remembers what was given back")
		}
		cache.Forget(charges[:1])
		if _, found := find(cache, charges[:1]); found {
			t.Error("remembers what was given back")
		}
	})
}

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

// A repeated decision about the same limits is computed again.
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
