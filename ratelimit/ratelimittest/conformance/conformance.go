// Package conformance is the suite that every rate limiter passes: in memory, on
// Redis, and yours.
package conformance

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
)

// Limiter is what the suite tests.
type Limiter interface {
	driver.Reserver

	// Peek returns the decision that Allow would make, and charges nothing.
	Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error)
	// Reset forgets what was charged to the limits and keys of the charges.
	Reset(ctx context.Context, charges ...ratelimit.Charge) error
}

// Test runs the suite. open returns a limiter without any counters; run runs a
// subtest's body, in a synctest bubble or as it is.
func Test(t *testing.T, open func(t *testing.T) Limiter, run func(t *testing.T, body func(t *testing.T))) {
	for name, test := range map[string]func(t *testing.T, l Limiter){
		"RandomScheduleAgainstModel":  testModel,
		"ExactUnderConcurrency":       testConcurrency,
		"LimitsInAnyOrder":            testAnyOrder,
		"WindowsCountApart":           testWindows,
		"RefundRestores":              testRefund,
		"RefundOfLapsedChargesIsNone": testLapsedRefund,
		"RefundWhateverTheKey":        testRefundOfOddKeys,
		"PeekChargesNothing":          testPeek,
		"ResetForgets":                testReset,
		"NeverForTooMuch":             testNever,
		"ReservationsQueueUp":         testReserve,
		"CancelRestores":              testCancel,
		"BadChargesAreRefused":        testInvalid,
		"KeysDoNotCollide":            testKeys,
		"CancelledContext":            testCancelled,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, func(t *testing.T) { test(t, open(t)) })
		})
	}
}

// A day's window does not end during a test, but for one at midnight UTC.
const day = 24 * time.Hour

func user(n int64) ratelimit.Limit {
	return ratelimit.Limit{Name: "user", Max: n, Window: day}
}

func global(n int64) ratelimit.Limit {
	return ratelimit.Limit{Name: "global", Max: n, Window: day}
}

func allow(t *testing.T, l ratelimit.Limiter, charges ...ratelimit.Charge) ratelimit.Decision {
	t.Helper()
	d, err := l.Allow(t.Context(), charges...)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Limits()) != len(charges) && !d.Cached {
		t.Fatalf("the decision has %d limits, want %d", len(d.Limits()), len(charges))
	}
	if (d.Denied == "") != d.Allowed || d.Allowed && (d.RetryAfter != 0 || d.Never || len(d.Charges()) != len(charges)) || !d.Allowed && d.Charges() != nil {
		t.Fatalf("the decision contradicts itself: %+v", d)
	}
	return d
}

// admitted returns how many of n charges one after the other are allowed.
func admitted(t *testing.T, l ratelimit.Limiter, n int, charges ...ratelimit.Charge) (count int) {
	t.Helper()
	for range n {
		if allow(t, l, charges...).Allowed {
			count++
		}
	}
	return count
}

// flood lets 64 goroutines charge users and the global limit, and returns what
// each user got.
func flood(t *testing.T, l ratelimit.Limiter, users, each int, perUser, total ratelimit.Limit) []int64 {
	t.Helper()
	const goroutines = 64
	got := make([]atomic.Int64, users)
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range users * each / goroutines {
				n := (g + i*goroutines) % users
				d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: perUser, Key: fmt.Sprint("u", n)}, ratelimit.Charge{Limit: total})
				if err != nil {
					t.Error(err)
					return
				}
				if d.Allowed {
					got[n].Add(1)
				}
			}
		})
	}
	wg.Wait()
	counts := make([]int64, users)
	for i := range got {
		counts[i] = got[i].Load()
	}
	return counts
}

func testConcurrency(t *testing.T, l Limiter) {
	for n, got := range flood(t, l, 16, 32, ratelimit.Limit{Name: "other", Max: 10, Window: day}, ratelimit.Limit{Name: "all", Max: 1000, Window: day}) {
		if got != 10 {
			t.Errorf("user %d got %d, want exactly 10", n, got)
		}
	}
	var sum int64
	for n, got := range flood(t, l, 20, 32, user(10), global(120)) {
		if got > 10 {
			t.Errorf("user %d got %d of 10", n, got)
		}
		sum += got
	}
	if sum != 120 {
		t.Errorf("%d were allowed, want exactly the 120 of the global limit", sum)
	}
}

// testAnyOrder charges the same limits in opposite orders at once.
func testAnyOrder(t *testing.T, l Limiter) {
	const goroutines, each = 16, 50
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range each {
				charges := []ratelimit.Charge{{Limit: user(10_000), Key: fmt.Sprint(i % 3)}, {Limit: user(10_000), Key: fmt.Sprint(3 + i%4)}, {Limit: global(10_000)}}
				if g%2 == 0 {
					slices.Reverse(charges)
				}
				if _, err := l.Allow(t.Context(), charges...); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if d := allow(t, l, ratelimit.Charge{Limit: global(10_000)}); d.Limits()[0].Remaining != 10_000-goroutines*each-1 {
		t.Errorf("%d are left, want %d", d.Limits()[0].Remaining, 10_000-goroutines*each-1)
	}
}

func testRefund(t *testing.T, l Limiter) {
	a := ratelimit.Charge{Limit: user(5), Key: "a", Cost: 3}
	all := ratelimit.Charge{Limit: global(4), Cost: 4}
	first := allow(t, l, a, all)
	if !first.Allowed || first.Limits()[0].Remaining != 2 || first.Limits()[1].Remaining != 0 {
		t.Fatalf("got %+v", first)
	}
	if allow(t, l, a, all).Allowed {
		t.Error("allowed beyond both limits")
	}
	if err := l.Refund(t.Context(), first.Charges()...); err != nil {
		t.Fatal(err)
	}
	if d := allow(t, l, a, all); !d.Allowed || d.Limits()[0].Remaining != 2 || d.Limits()[1].Remaining != 0 {
		t.Errorf("after the refund got %+v", d)
	}
	for range 3 { // more than was taken
		if err := l.Refund(t.Context(), a, all); err != nil {
			t.Fatal(err)
		}
	}
	if n := admitted(t, l, 10, ratelimit.Charge{Limit: user(5), Key: "a"}); n != 5 {
		t.Errorf("too many refunds gave %d, want the limit's 5", n)
	}
}

func testLapsedRefund(t *testing.T, l Limiter) {
	c := ratelimit.Charge{Limit: user(3), Key: "a"}
	d := allow(t, l, c)
	old := d.Charges()
	old[0].At = old[0].At.Add(-2 * day) // as if it had been charged two windows ago
	if err := l.Refund(t.Context(), old...); err != nil {
		t.Fatal(err)
	}
	if n := admitted(t, l, 5, c); n != 2 {
		t.Errorf("%d more were allowed, want 2", n)
	}
}

func pause(t *testing.T, d time.Duration) {
	t.Helper()
	if err := runloop.Sleep(t.Context(), d); err != nil {
		t.Fatal(err)
	}
}
