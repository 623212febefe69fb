// Package conformance is the test suite that every rate limiter passes, in memory and on Redis.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
)

// Limiter is a limiter under test.
type Limiter interface {
	driver.Reserver

	// Peek returns the decision that Allow would make, and charges nothing.
	Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error)
	// Reset clears the counters of the charges.
	Reset(ctx context.Context, charges ...ratelimit.Charge) error
}

// Test runs the suite. open returns a limiter without any counters. run runs the body of a subtest, in a synctest
// bubble or directly.
func Test(t *testing.T, open func(t *testing.T) Limiter, run func(t *testing.T, body func(t *testing.T))) {
	for name, test := range map[string]func(t *testing.T, l Limiter){
		"RandomScheduleAgainstModel":  testModel,
		"ExactUnderConcurrency":       testConcurrency,
		"LimitsInAnyOrder":            testAnyOrder,
		"WindowsCountApart":           testWindows,
		"RefundRestores":              testRefund,
		"RefundOfLapsedChargesIsNone": testLapsedRefund,
		"RefundOfUnusualKeys":         testRefundOfOddKeys,
		"PeekChargesNothing":          testPeek,
		"ResetForgets":                testReset,
		"NeverForTooMuch":             testNever,
		"ReservationsQueueUp":         testReserve,
		"CancelRestores":              testCancel,
		"InvalidChargesAreRejected":   testInvalid,
		"KeysDoNotCollide":            testKeys,
		"CancelledContext":            testCancelled,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, func(t *testing.T) { test(t, open(t)) })
		})
	}
}

// A one-day window ends during a test only at midnight UTC.
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

// admitted returns how many of n consecutive charges are allowed.
func admitted(t *testing.T, l ratelimit.Limiter, n int, charges ...ratelimit.Charge) (count int) {
	t.Helper()
	for range n {
		if allow(t, l, charges...).Allowed {
			count++
		}
	}
	return count
}

// flood lets 64 goroutines charge users and the global limit, and returns the number of admitted charges per user.
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

// testAnyOrder charges the same limits in opposite orders concurrently.
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
	for range 3 { // more than was charged
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

func bucket(n, burst int64, window time.Duration) ratelimit.Limit {
	return ratelimit.Limit{Name: "bucket", Max: n, Window: window, Algorithm: ratelimit.TokenBucket, Burst: burst}
}

func testReserve(t *testing.T, l Limiter) {
	c := ratelimit.Charge{Limit: bucket(1, 2, 10*time.Second)} // one per 10 s, two at once
	var first time.Time
	for n := range 5 {
		d, err := l.Reserve(t.Context(), 30*time.Second, c)
		if err != nil || !d.Allowed {
			t.Fatalf("reservation %d: %+v, %v", n, d, err)
		}
		if n == 0 {
			first = d.At
		}
		want := max(0, time.Duration(n-1)*10*time.Second-d.At.Sub(first)) // timing: times returned by the limiter
		if d.Delay != want {
			t.Errorf("reservation %d: delay %v, want %v", n, d.Delay, want)
		}
	}
	d, err := l.Reserve(t.Context(), 30*time.Second, c)
	if err != nil || d.Allowed || d.Denied != "bucket" || d.RetryAfter <= 30*time.Second {
		t.Errorf("reserved beyond within: %+v, %v", d, err)
	}
	if d := allow(t, l, c); d.Allowed {
		t.Error("allowed ahead of the reservations")
	}
	if _, err := l.Reserve(t.Context(), time.Second, ratelimit.Charge{Limit: user(1)}); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("reserved from a window: %v", err)
	}
	for _, within := range []time.Duration{-1, driver.MaxReserve + 1} {
		if _, err := l.Reserve(t.Context(), within, c); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("reserved within %v: %v", within, err)
		}
	}
}

// told records the last decision of a limiter.
type told struct {
	Limiter
	last ratelimit.Decision
}

func (l *told) Reserve(ctx context.Context, within time.Duration, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	d, err = l.Limiter.Reserve(ctx, within, charges...)
	l.last = d
	return d, err
}

func testCancel(t *testing.T, l Limiter) {
	c := ratelimit.Charge{Limit: bucket(1, 1, 100*time.Second)}
	if !allow(t, l, c).Allowed {
		t.Fatal("the bucket is not full")
	}
	noted := &told{Limiter: l}
	waiter, err := ratelimit.NewWaiter(noted, []ratelimit.Charge{c}, ratelimit.WaiterConfig{})
	if err != nil {
		t.Fatal(err)
	}
	reserve := func() (r *ratelimit.Reservation, due time.Time) {
		t.Helper()
		r, err := waiter.Reserve(t.Context(), time.Hour)
		if err != nil || r.Delay != noted.last.Delay {
			t.Fatalf("%+v, %v, want %v", r, err, noted.last.Delay)
		}
		return r, noted.last.At.Add(r.Delay)
	}
	reserve()
	second, place := reserve()
	for range 2 { // the second Cancel does nothing
		if err := second.Cancel(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, again := reserve(); again.Sub(place).Abs() > time.Millisecond { // timing: times returned by the limiter
		t.Errorf("after a cancel the next reservation is %v away from the cancelled one", again.Sub(place))
	}
	if _, err := waiter.Reserve(t.Context(), time.Second); !errors.Is(err, ratelimit.ErrWaitTooLong) {
		t.Errorf("a reservation beyond within: %v", err)
	}
}

func testNever(t *testing.T, l Limiter) {
	huge := int64(1) << 62
	for _, c := range []ratelimit.Charge{
		{Limit: user(5), Cost: 6},
		{Limit: user(5), Cost: huge},
		{Limit: bucket(100, 5, day), Cost: 6},
		{Limit: bucket(100, 5, day), Cost: huge},
	} {
		all := ratelimit.Charge{Limit: global(10)}
		if d := allow(t, l, c, all); d.Allowed || !d.Never || d.Denied != c.Limit.Name || d.RetryAfter != 0 || d.Limits()[1].Remaining != 10 {
			t.Errorf("cost %d: got %+v, want never", c.Cost, d)
		}
	}
	c := ratelimit.Charge{Limit: bucket(1000, 5, time.Second), Cost: 6}
	if d, err := l.Reserve(t.Context(), time.Hour, c); err != nil || d.Allowed || !d.Never {
		t.Errorf("reserved more than the bucket holds: %+v, %v", d, err)
	}
	if d := allow(t, l, ratelimit.Charge{Limit: bucket(1000, 5, time.Second), Cost: 5}); !d.Allowed {
		t.Errorf("an impossible charge was counted: %+v", d)
	}
}

func testInvalid(t *testing.T, l Limiter) {
	many := make([]ratelimit.Charge, driver.MaxCharges+1)
	for i := range many {
		many[i] = ratelimit.Charge{Limit: user(1), Key: fmt.Sprint(i)}
	}
	one := ratelimit.Charge{Limit: user(1), Key: "a"}
	for name, charges := range map[string][]ratelimit.Charge{
		"none":             {},
		"too many":         many,
		"twice the same":   {one, one},
		"no name":          {{Limit: ratelimit.Limit{Max: 1}}},
		"bad name":         {{Limit: ratelimit.Limit{Name: "a:b", Max: 1}}},
		"long name":        {{Limit: ratelimit.Limit{Name: strings.Repeat("a", 33), Max: 1}}},
		"zero max":         {{Limit: ratelimit.Limit{Name: "a"}}},
		"negative max":     {{Limit: ratelimit.Limit{Name: "a", Max: -1}}},
		"huge max":         {{Limit: ratelimit.Limit{Name: "a", Max: 1 << 62}}},
		"inexact max":      {{Limit: ratelimit.Limit{Name: "a", Max: 1 << 40, Window: time.Hour}}},
		"short window":     {{Limit: ratelimit.Limit{Name: "a", Max: 1, Window: time.Second - 1}}},
		"negative window":  {{Limit: ratelimit.Limit{Name: "a", Max: 1, Window: -time.Minute}}},
		"fractional":       {{Limit: ratelimit.Limit{Name: "a", Max: 1, Window: time.Second + time.Microsecond}}},
		"long window":      {{Limit: ratelimit.Limit{Name: "a", Max: 1, Window: 400 * day}}},
		"burst of window":  {{Limit: ratelimit.Limit{Name: "a", Max: 1, Burst: 2}}},
		"burst of fixed":   {{Limit: ratelimit.Limit{Name: "a", Max: 1, Burst: 2, Algorithm: ratelimit.FixedWindow}}},
		"negative burst":   {{Limit: ratelimit.Limit{Name: "a", Max: 1, Burst: -2, Algorithm: ratelimit.TokenBucket}}},
		"unknown":          {{Limit: ratelimit.Limit{Name: "a", Max: 1, Algorithm: 9}}},
		"negative cost":    {{Limit: user(1), Cost: -1}},
		"good one beside":  {one, {Limit: user(1), Key: "b", Cost: -1}},
		"huge burst":       {{Limit: ratelimit.Limit{Name: "a", Max: 1, Burst: 1 << 61, Algorithm: ratelimit.TokenBucket}}},
		"same when hashed": {{Limit: user(1), Key: strings.Repeat("x", 99)}, {Limit: user(1), Key: strings.Repeat("x", 99)}},
	} {
		if d, err := l.Allow(t.Context(), charges...); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: Allow returned %+v, %v", name, d, err)
		}
		if err := l.Reset(t.Context(), charges...); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: Reset returned %v", name, err)
		}
		if _, err := l.Peek(t.Context(), charges...); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: Peek returned %v", name, err)
		}
		if err := l.Refund(t.Context(), charges...); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: Refund returned %v", name, err)
		}
	}
	if n := admitted(t, l, 3, one); n != 1 {
		t.Errorf("a rejected call was charged: %d allowed, want 1", n)
	}
}

func testPeek(t *testing.T, l Limiter) {
	c := ratelimit.Charge{Limit: user(1)}
	for range 3 {
		if d, err := l.Peek(t.Context(), c); err != nil || !d.Allowed || d.Charges() != nil || d.Limits()[0].Remaining != 0 {
			t.Errorf("got %+v, %v", d, err)
		}
	}
	if n := admitted(t, l, 3, c); n != 1 {
		t.Errorf("%d were allowed after three peeks, want 1", n)
	}
	if d, err := l.Peek(t.Context(), c); err != nil || d.Allowed || d.RetryAfter <= 0 || d.Denied != "user" {
		t.Errorf("Peek at an exhausted limit returned %+v, %v", d, err)
	}
}

func testReset(t *testing.T, l Limiter) {
	charges := []ratelimit.Charge{{Limit: user(2), Key: "a"}, {Limit: bucket(1, 2, day)}, {Limit: global(100)}}
	for range 2 {
		if n := admitted(t, l, 4, charges...); n != 2 {
			t.Errorf("%d were allowed, want 2", n)
		}
		if err := l.Reset(t.Context(), charges[:2]...); err != nil {
			t.Fatal(err)
		}
	}
	if d := allow(t, l, charges[2]); d.Limits()[0].Remaining != 95 {
		t.Errorf("%d are left of the limit that was not reset, want 95", d.Limits()[0].Remaining)
	}
	if err := l.Reset(t.Context(), ratelimit.Charge{Limit: user(1), Key: "never charged"}); err != nil {
		t.Error(err)
	}
}

func testKeys(t *testing.T, l Limiter) {
	long := strings.Repeat("x", 10_000)
	keys := []string{
		"", "a", "A", "a:b", "a:b:c", "{a}", "}{", "a b", "a\r\nb", "\x00", "\xff\xfe", "é", "*", "..", "-", "user",
		long, long + "x", strings.Repeat("x", 64), strings.Repeat("x", 65), driver.EncodeKey(long), "h-", "b",
	}
	for _, key := range keys {
		if n := admitted(t, l, 4, ratelimit.Charge{Limit: user(2), Key: key}); n != 2 {
			t.Errorf("key %.20q got %d, want 2 of its own", key, n)
		}
	}
}

// Limits of one name with different windows have separate counters.
func testWindows(t *testing.T, l Limiter) {
	for _, a := range []ratelimit.Algorithm{ratelimit.SlidingWindow, ratelimit.FixedWindow, ratelimit.TokenBucket} {
		for n, window := range []time.Duration{day, 2 * day, 30 * day} {
			c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 2, Window: window, Algorithm: a}, Key: fmt.Sprint(a)}
			if d := allow(t, l, c); !d.Allowed || d.Limits()[0].Remaining != 1 {
				t.Errorf("algorithm %d: window %d of one name left %+v, want 1", a, n, d.Limits())
			}
		}
	}
}

// The charges of a decision name the same counters again.
func testRefundOfOddKeys(t *testing.T, l Limiter) {
	for _, key := range []string{"plain", "2001:db8::1", "a@b.example", "h-", strings.Repeat("x", 10_000)} {
		c := ratelimit.Charge{Limit: user(1), Key: key}
		d := allow(t, l, c)
		if d.Charges()[0].Key != key {
			t.Errorf("%.20q was charged as %.20q", key, d.Charges()[0].Key)
		}
		if err := l.Refund(t.Context(), d.Charges()...); err != nil {
			t.Fatal(err)
		}
		if n := admitted(t, l, 3, c); n != 1 {
			t.Errorf("key %.20q got %d after its refund, want 1", key, n)
		}
	}
}

func testCancelled(t *testing.T, l Limiter) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := ratelimit.Charge{Limit: user(1)}
	if _, err := l.Allow(ctx, c); !errors.Is(err, context.Canceled) {
		t.Errorf("Allow returned %v", err)
	}
	if err := l.Refund(ctx, c); !errors.Is(err, context.Canceled) {
		t.Errorf("Refund returned %v", err)
	}
	if !allow(t, l, c).Allowed {
		t.Error("a cancelled call was charged")
	}
}
