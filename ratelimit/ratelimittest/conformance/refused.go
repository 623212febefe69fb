package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
)

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
		t.Errorf("what can never be was charged: %+v", d)
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
			t.Errorf("%s: Allow says %+v, %v", name, d, err)
		}
		if err := l.Reset(t.Context(), charges...); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: Reset says %v", name, err)
		}
		if _, err := l.Peek(t.Context(), charges...); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: Peek says %v", name, err)
		}
		if err := l.Refund(t.Context(), charges...); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: Refund says %v", name, err)
		}
	}
	if n := admitted(t, l, 3, one); n != 1 {
		t.Errorf("what was refused has charged something: %d allowed, want 1", n)
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
		t.Errorf("a peek at what is used up says %+v, %v", d, err)
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
		t.Errorf("%d are left of what was not reset, want 95", d.Limits()[0].Remaining)
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

// Limits of one name with different windows have counters of their own.
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

// What a decision says was taken names the same counters again.
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
		t.Errorf("Allow says %v", err)
	}
	if err := l.Refund(ctx, c); !errors.Is(err, context.Canceled) {
		t.Errorf("Refund says %v", err)
	}
	if !allow(t, l, c).Allowed {
		t.Error("a cancelled call was charged")
	}
}
