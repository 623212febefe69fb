package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/internal/ratelimit/conformance"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// halting is a store whose calls a test can count and intercept.
type halting struct {
	*ratelimit.Memory
	mu     sync.Mutex
	trips  int
	before func(charges []ratelimit.Charge) error // called before each decision; optional
	after  func()                                 // called before each answer; optional
}

func (h *halting) Allow(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	h.mu.Lock()
	h.trips++
	h.mu.Unlock()
	if h.before != nil {
		if err := h.before(charges); err != nil {
			return ratelimit.Decision{}, err
		}
	}
	d, err := h.Memory.Allow(ctx, charges...)
	if h.after != nil {
		h.after()
	}
	return d, err
}

// leasedOf returns a running limiter, its store, and a function that ends it.
func leasedOf(t *testing.T, cfg ratelimit.LeasedConfig) (*ratelimit.Leased, *halting, func()) {
	t.Helper()
	store := &halting{Memory: newMemory(t)}
	l, err := ratelimit.NewLeased(store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	synctest.Wait()
	end := func() {
		t.Helper()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	return l, store, end
}

// mustAllow fails unless the charges are allowed with that many round trips.
func mustAllow(t *testing.T, l ratelimit.Limiter, store *halting, trips int, charges ...ratelimit.Charge) ratelimit.Decision {
	t.Helper()
	before := store.trips
	d, err := l.Allow(t.Context(), charges...)
	if err != nil || !d.Allowed || store.trips != before+trips {
		t.Fatalf("%+v: got %+v, %v in %d trips, want it allowed in %d", charges, d, err, store.trips-before, trips)
	}
	return d
}

func remaining(t *testing.T, store *halting, c ratelimit.Charge) int64 {
	t.Helper()
	d, err := store.Peek(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	left := d.Limits()[0].Remaining
	if d.Allowed { // Peek returns the state after the charge
		left += max(1, c.Cost)
	}
	return left
}

// A busy limit is decided in memory except for a few round trips, with the same decisions as the store's.
func TestLeased(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{})
		user := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100_000, Window: time.Hour}, Key: "ann"}
		global := ratelimit.Charge{Limit: ratelimit.Limit{Name: "global", Max: 1_000_000, Algorithm: ratelimit.FixedWindow, Window: time.Hour}}
		for n := range int64(5000) {
			time.Sleep(100 * time.Microsecond)
			d, err := l.Allow(t.Context(), user, global)
			if err != nil || !d.Allowed {
				t.Fatal(d, err)
			}
			for i, s := range d.Limits() {
				if want := []int64{100_000, 1_000_000}[i] - n - 1; s.Remaining != want || s.Reset <= 0 || s.Reset > time.Hour {
					t.Fatalf("after %d: %+v, want %d to remain", n+1, s, want)
				}
			}
			if c := d.Charges(); len(c) != 2 || c[0].Key != "ann" || c[0].Cost != 1 || time.Since(c[1].At) > time.Millisecond || time.Since(c[1].At) < -4*time.Millisecond {
				t.Fatalf("after %d: %+v", n+1, c)
			}
		}
		if store.trips > 25 {
			t.Errorf("%d trips for 5000 decisions in half a second", store.trips)
		}
		if left := remaining(t, store, user); left >= 95_000 {
			t.Errorf("%d remain in the store: nothing is leased", left)
		}
		end()
		if left := remaining(t, store, user); left != 95_000 {
			t.Errorf("%d remain in the store in the end, want 95000", left)
		}
		before := store.trips
		mustAllow(t, l, store, 1, user, global)
		mustAllow(t, l, store, 1, user, global)
		if store.trips != before+2 {
			t.Error("it leases although it does not run")
		}
	})
}

// The metric is the sum of all limiters of a process, not the value of one of them.
func TestLeased_metricIsASum(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		meter := &metrictest.Recorder{}
		for range 2 {
			l, store, end := leasedOf(t, ratelimit.LeasedConfig{Share: 10, MeterProvider: meter})
			defer end()
			c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 1000, Window: time.Hour}}
			for range 6 {
				_ = mustAllowAny(t, l, c)
			}
			mustAllow(t, l, store, 1, c) // 1+4
		}
		if got, err := meter.Collect(t.Context()); err != nil || got["holdfast.ratelimit.leased{limit=user}"] != 8 {
			t.Errorf("collected %v, %v, want 4 units of each limiter", got, err)
		}
	})
}

// Units held longer than 200 ms are refunded, and occasional calls take nothing ahead.
func TestLeasedGivesBackWhenIdle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		meter := &metrictest.Recorder{}
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{Share: 10, MeterProvider: meter})
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 1000, Window: time.Hour}}
		for range 6 { // 1, 1+1, 1, 1+2, 1, 1
			_ = mustAllowAny(t, l, c)
		}
		mustAllow(t, l, store, 1, c) // 1+4
		held := func(want float64) {
			t.Helper()
			got, err := meter.Collect(t.Context())
			if err != nil || got["holdfast.ratelimit.leased{limit=user}"] != want {
				t.Errorf("collected %v, %v, want %v held", got, err, want)
			}
		}
		held(4)
		if left := remaining(t, store, c); left != 989 {
			t.Errorf("%d remain in the store, want 989", left)
		}
		time.Sleep(2*100*time.Millisecond + time.Millisecond)
		held(0)
		if left := remaining(t, store, c); left != 993 {
			t.Errorf("%d remain in the store, want 993", left)
		}
		for range 3 {
			time.Sleep(time.Second)
			mustAllow(t, l, store, 1, c)
			held(0)
		}
		end()
		if got, err := meter.Collect(t.Context()); err != nil || len(got) != 0 {
			t.Errorf("collected %v, %v in the end", got, err)
		}
	})
}

func mustAllowAny(t *testing.T, l ratelimit.Limiter, charges ...ratelimit.Charge) ratelimit.Decision {
	t.Helper()
	d, err := l.Allow(t.Context(), charges...)
	if err != nil || !d.Allowed {
		t.Fatalf("%+v: got %+v, %v", charges, d, err)
	}
	return d
}

// hold makes l hold n units, 2, 4 or 8, of a charge whose Share is 1, and returns the number of spent units.
func hold(t *testing.T, l ratelimit.Limiter, store *halting, c ratelimit.Charge, n int64) (spent int64) {
	t.Helper()
	c.Cost = 1
	for ahead := int64(1); ; ahead *= 2 {
		if ahead > 1 {
			for range ahead / 2 {
				mustAllow(t, l, store, 0, c)
				spent++
			}
		} else {
			mustAllow(t, l, store, 1, c)
			spent++
		}
		mustAllow(t, l, store, 1, c)
		spent++
		if ahead == n {
			return spent
		}
	}
}

// Denials in between do not extend the time that a process holds its units.
func TestLeasedGivesBackWhenDenied(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{Share: 1})
		defer end()
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: time.Hour}}
		hold(t, l, store, c, 2)
		other := c
		other.Cost = remaining(t, store, c)
		if d, err := store.Memory.Allow(t.Context(), other); err != nil || !d.Allowed {
			t.Fatal(d, err)
		}
		three := c
		three.Cost = 3
		for range 5 {
			if d, err := l.Allow(t.Context(), three); err != nil || d.Allowed {
				t.Fatal(d, err)
			}
			time.Sleep(45 * time.Millisecond)
		}
		if left := remaining(t, store, c); left != 2 {
			t.Errorf("%d remain in the store, want the 2 that were held", left)
		}
	})
}

// Leased units count for a part of a cost, and when the store has no more.
func TestLeasedPartOfACost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{Share: 1})
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: time.Hour}}
		spent := hold(t, l, store, c, 2)
		other := c
		other.Cost = remaining(t, store, c)
		if d, err := store.Memory.Allow(t.Context(), other); err != nil || !d.Allowed {
			t.Fatal(d, err)
		}
		c.Cost = 3
		d, err := l.Allow(t.Context(), c)
		if err != nil || d.Allowed || d.Denied != "user" || d.RetryAfter <= 0 {
			t.Fatalf("3 with 2 held and none in the store: %+v, %v", d, err)
		}
		small := ratelimit.Charge{Limit: ratelimit.Limit{Name: "small", Max: 1, Window: time.Hour, Algorithm: ratelimit.TokenBucket}, Cost: 1}
		c.Cost = 2
		d = mustAllow(t, l, store, 1, small, c) // the store decides about one of them
		if s := d.Limits(); len(s) != 2 || s[1].Remaining != 0 || len(d.Charges()) != 2 || d.Charges()[1].Cost != 2 {
			t.Errorf("got %+v, %+v", s, d.Charges())
		}
		if err := l.Refund(t.Context(), d.Charges()[1]); err != nil {
			t.Fatal(err)
		}
		mustAllow(t, l, store, 1, c)
		end()
		c.Cost = 1
		if left := remaining(t, store, c); left != 100-spent-other.Cost-2 {
			t.Errorf("%d remain, %d were spent and %d by others", left, spent+2, other.Cost)
		}
	})
}

// A denial by one limit keeps the leased units of another. If only the units ahead exceed a limit, the call is
// repeated without them.
func TestLeasedDenials(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{Share: 1})
		defer end()
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "global", Max: 100, Window: time.Hour}}
		hold(t, l, store, c, 4)
		small := ratelimit.Charge{Limit: ratelimit.Limit{Name: "small", Max: 1, Window: time.Hour, Algorithm: ratelimit.TokenBucket}}
		mustAllow(t, l, store, 1, small)
		for range 3 {
			d, err := l.Allow(t.Context(), c, small)
			if err != nil || d.Allowed || d.Denied != "small" || len(d.Limits()) != 2 || d.Limits()[0].Name != "global" || d.Charges() != nil {
				t.Fatalf("got %+v, %+v, %v", d, d.Limits(), err)
			}
		}
		other := c
		other.Cost = remaining(t, store, c) - 1
		if d, err := store.Memory.Allow(t.Context(), other); err != nil || !d.Allowed {
			t.Fatal(d, err)
		}
		for range 4 {
			mustAllow(t, l, store, 0, c)
		}
		d := mustAllow(t, l, store, 2, c) // its state is outdated: it assumes more units
		if left := d.Limits()[0].Remaining; left != 0 || len(d.Charges()) != 1 || d.Charges()[0].Cost != 1 {
			t.Errorf("got %+v", d)
		}
		c.Cost = 101
		if d, err := l.Allow(t.Context(), c); err != nil || !d.Never {
			t.Errorf("above the limit: %+v, %v", d, err)
		}
		c.Cost = -1
		if _, err := l.Allow(t.Context(), c); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("below 0: %v", err)
		}
		c.Cost = 1
		if _, err := l.Allow(t.Context(), c, c); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("twice: %v", err)
		}
		if _, err := l.Allow(t.Context()); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("none: %v", err)
		}
	})
}

// Units that calls return are kept only up to the lease's limit.
func TestLeasedHoldsNoMore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		meter := &metrictest.Recorder{}
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{Share: 25, MeterProvider: meter})
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: time.Hour}}
		small := ratelimit.Charge{Limit: ratelimit.Limit{Name: "small", Max: 1, Window: time.Hour}}
		spent := hold(t, l, store, c, 2)
		mustAllow(t, l, store, 1, small)
		store.before = func(charges []ratelimit.Charge) error {
			if charges[0].Limit.Name == "small" {
				time.Sleep(10 * time.Millisecond)
			}
			return nil
		}
		denied := make(chan bool, 1)
		go func() {
			two := c
			two.Cost = 2
			d, err := l.Allow(t.Context(), small, two)
			denied <- err == nil && d.Denied == "small"
		}()
		synctest.Wait()
		mustAllow(t, l, store, 1, c) // and 3 ahead
		if !<-denied {
			t.Error("not denied")
		}
		got, err := meter.Collect(t.Context())
		if left := remaining(t, store, c); err != nil || got["holdfast.ratelimit.leased{limit=user}"] != 4 || left != 100-spent-1-4 {
			t.Errorf("collected %v, %v, want 4 of 2 + 3 held; %d remain in the store", got, err, left)
		}
		end()
	})
}

// While the store is unavailable the leased units are spent; then the store's policy decides.
func TestLeasedOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{Share: 1})
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: time.Hour}}
		spent := hold(t, l, store, c, 2)
		store.before = func([]ratelimit.Charge) error { return ratelimit.ErrUnavailable }
		c.Cost = 3
		if _, err := l.Allow(t.Context(), c); !errors.Is(err, ratelimit.ErrUnavailable) {
			t.Fatalf("more than is held: %v", err)
		}
		c.Cost = 1
		mustAllow(t, l, store, 0, c)
		mustAllow(t, l, store, 0, c)
		if _, err := l.Allow(t.Context(), c); !errors.Is(err, ratelimit.ErrUnavailable) {
			t.Fatalf("more than is held: %v", err)
		}
		store.before = nil
		mustAllow(t, l, store, 1, c)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := l.Allow(ctx, c); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		end()
		if left := remaining(t, store, c); left != 100-spent-3 {
			t.Errorf("%d remain, want %d", left, 100-spent-3)
		}
	})
}

// A call that ends after Run leaves no leased units.
func TestLeasedEndsUnderACall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{Share: 1})
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: time.Hour}}
		spent := hold(t, l, store, c, 2)
		mustAllow(t, l, store, 0, c)
		mustAllow(t, l, store, 0, c)
		store.before = func([]ratelimit.Charge) error {
			time.Sleep(time.Second)
			return nil
		}
		done := make(chan error, 1)
		go func() {
			_, err := l.Allow(t.Context(), c)
			done <- err
		}()
		synctest.Wait()
		end()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if left := remaining(t, store, c); left != 100-spent-3 {
			t.Errorf("%d remain, want %d", left, 100-spent-3)
		}
	})
}

// The number of leases is limited, and idle leases are removed.
func TestLeasedIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{Share: 1})
		defer end()
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: time.Hour}}
		for n := range 12_000 {
			c.Key = fmt.Sprint(n)
			mustAllow(t, l, store, 1, c)
		}
		if n := l.Leases(); n != 10_000 {
			t.Errorf("%d leases, want 10000", n)
		}
		time.Sleep(time.Second)
		if n := l.Leases(); n != 0 {
			t.Errorf("%d leases are left", n)
		}
	})
}

// Leased passes the suite of all limiters.
func TestLeasedConformance(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Limiter {
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{})
		t.Cleanup(end)
		return struct {
			*ratelimit.Leased
			peeks
		}{l, store}
	}, synctest.Test)
}

type peeks interface {
	Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error)
	Reset(ctx context.Context, charges ...ratelimit.Charge) error
}

func TestLeasedConstruction(t *testing.T) {
	t.Parallel()
	if _, err := ratelimit.NewLeased(nil, ratelimit.LeasedConfig{Share: -1}); err == nil {
		t.Error("accepted no store and a negative share")
	}
	synctest.Test(t, func(t *testing.T) {
		l, _, end := leasedOf(t, ratelimit.LeasedConfig{})
		if err := l.Ready(t.Context()); err != nil {
			t.Error(err)
		}
		if err := l.Run(t.Context()); err == nil {
			t.Error("runs twice")
		}
		end()
		if err := l.Ready(t.Context()); err == nil {
			t.Error("ready although it does not run")
		}
	})
}

// A decision in memory about up to three limits allocates nothing.
func TestLeasedAllocations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{})
		defer end()
		charges := []ratelimit.Charge{
			{Limit: ratelimit.Limit{Name: "user", Max: 1 << 29, Window: time.Hour}, Key: "ann"},
			{Limit: ratelimit.Limit{Name: "ip", Max: 1 << 29, Window: time.Hour}, Key: "2001:db8::/64"},
			{Limit: ratelimit.Limit{Name: "global", Max: 1 << 29, Window: time.Hour}},
		}
		ask := func() { _ = mustAllowAny(t, l, charges...) }
		for range 10_000 {
			ask()
		}
		trips := store.trips
		if n := testing.AllocsPerRun(1000, ask); n != 0 || store.trips != trips {
			t.Errorf("%v allocations per decision, %d trips", n, store.trips-trips)
		}
	})
}

// A process takes units ahead and spends them in memory.
func ExampleNewLeased() {
	store, err := ratelimit.NewMemory(ratelimit.MemoryConfig{}) // with several processes: ratelimitredis.New
	if err != nil {
		panic(err)
	}
	limiter, err := ratelimit.NewLeased(store, ratelimit.LeasedConfig{})
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- limiter.Run(ctx) }() // refunds the units that are not spent

	global := ratelimit.Charge{Limit: ratelimit.Limit{Name: "global", Max: 100_000, Window: 24 * time.Hour}}
	for range 1000 {
		if d, err := limiter.Allow(ctx, global); err != nil || !d.Allowed {
			panic(fmt.Sprint(d, err))
		}
	}
	stop()
	if err := <-ended; err != nil {
		panic(err)
	}
	d, err := store.Peek(context.Background(), global)
	if err != nil {
		panic(err)
	}
	fmt.Println("remaining:", d.Limits()[0].Remaining+1)
	// Output:
	// remaining: 99000
}

// A panic of the store leaves the limit unchanged: units are taken ahead again.
func TestLeasedOutlivesAPanic(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, store, end := leasedOf(t, ratelimit.LeasedConfig{Share: 1})
		defer end()
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: time.Hour}}
		mustAllow(t, l, store, 1, c)
		store.before = func([]ratelimit.Charge) error { panic("a hook of the client") }
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic did not reach the caller")
				}
			}()
			_, _ = l.Allow(t.Context(), c)
		}()
		store.before = nil
		mustAllow(t, l, store, 1, c) // takes one unit ahead
		mustAllow(t, l, store, 0, c)
	})
}
