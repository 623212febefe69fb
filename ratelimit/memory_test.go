package ratelimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/ratelimit/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func newMemory(t *testing.T) *ratelimit.Memory {
	t.Helper()
	m, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Limiter { return newMemory(t) }, synctest.Test)
}

func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, err := ratelimit.NewMemory(ratelimit.MemoryConfig{MaxKeys: 1000})
		if err != nil {
			t.Fatal(err)
		}
		limit := ratelimit.Limit{Name: "user", Max: 1}
		for n := range 50_000 {
			if d, err := m.Allow(t.Context(), ratelimit.Charge{Limit: limit, Key: fmt.Sprint(n)}); err != nil || !d.Allowed {
				t.Fatalf("key %d: %+v, %v", n, d, err)
			}
		}
		if n := m.Len(); n > 1000 {
			t.Errorf("%d counters are kept, want at most 1000", n)
		}
	})
	if _, err := ratelimit.NewMemory(ratelimit.MemoryConfig{MaxKeys: -1}); err == nil {
		t.Error("accepted a negative bound")
	}
}

// Many new keys must not evict the shared counter.
func TestFloodOfKeysDoesNotResetTheSharedLimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, err := ratelimit.NewMemory(ratelimit.MemoryConfig{MaxKeys: 1000})
		if err != nil {
			t.Fatal(err)
		}
		ip, global := ratelimit.Limit{Name: "ip", Max: 5}, ratelimit.Charge{Limit: ratelimit.Limit{Name: "global", Max: 100}}
		allowed := 0
		for n := range 20_000 {
			if _, err := m.Allow(t.Context(), ratelimit.Charge{Limit: ip, Key: fmt.Sprint(n)}); err != nil {
				t.Fatal(err)
			}
			d, err := m.Allow(t.Context(), global)
			if err != nil {
				t.Fatal(err)
			}
			if d.Allowed {
				allowed++
			}
		}
		if allowed != 100 {
			t.Errorf("%d were allowed by the limit of 100", allowed)
		}
	})
}

func TestSchedules(t *testing.T) {
	t.Parallel()
	for range 2 + testenv.Rounds(t) {
		synctest.Test(t, func(t *testing.T) {
			conformance.TestSchedules(t, newMemory(t), func(_ *testing.T, d time.Duration) { time.Sleep(d) }, 1000)
		})
	}
}

// Common decisions allocate nothing.
func TestAllocations(t *testing.T) {
	m := newMemory(t)
	limits := []ratelimit.Limit{
		{Name: "user", Max: 3}, {Name: "tokens", Max: 3, Algorithm: ratelimit.TokenBucket}, {Name: "global", Max: 1000, Algorithm: ratelimit.FixedWindow},
	}
	one := func() { _, _ = m.Allow(t.Context(), ratelimit.Charge{Limit: limits[0], Key: "a"}) }
	three := func() {
		_, _ = m.Allow(t.Context(), ratelimit.Charge{Limit: limits[0], Key: "2001:db8::/64"}, ratelimit.Charge{Limit: limits[1], Key: "b"}, ratelimit.Charge{Limit: limits[2]})
	}
	for name, ask := range map[string]func(){"one limit": one, "three limits": three} {
		if n := testing.AllocsPerRun(100, ask); n != 0 {
			t.Errorf("%s: %v allocations per decision", name, n)
		}
	}
}

// coded is an error for clients.
type coded interface {
	error
	Code() string
	HTTPStatus() int
	RetryAfter() time.Duration
}

// Every error for clients has its code and status, even when it is wrapped.
func TestErrorsWithACode(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		err        error
		code       string
		status     int
		retryAfter time.Duration
	}{
		{ratelimit.ErrUnavailable, "RATE_LIMIT_UNAVAILABLE", http.StatusServiceUnavailable, time.Second},
		{ratelimit.ErrNoKey, "RATE_LIMIT_KEY_REQUIRED", http.StatusBadRequest, 0},
		{ratelimit.Decision{Denied: "user", RetryAfter: 1500 * time.Millisecond}.Err(), "RATE_LIMITED", http.StatusTooManyRequests, 1500 * time.Millisecond},
		{ratelimit.Decision{Denied: "user", Never: true}.Err(), "RATE_LIMITED", http.StatusTooManyRequests, 0},
	} {
		got, ok := errors.AsType[coded](fmt.Errorf("wrapped: %w", tc.err))
		if !ok {
			t.Errorf("%v has no code", tc.err)
			continue
		}
		if got.Code() != tc.code || got.HTTPStatus() != tc.status || got.RetryAfter() != tc.retryAfter {
			t.Errorf("%v: %s, %d, %v, want %s, %d, %v", tc.err, got.Code(), got.HTTPStatus(), got.RetryAfter(), tc.code, tc.status, tc.retryAfter)
		}
	}
	if err := (ratelimit.Decision{Allowed: true}).Err(); err != nil {
		t.Errorf("an allowed decision is the error %v", err)
	}
	if err := (ratelimit.Decision{Denied: "user", Never: true}).Err(); !errors.Is(err, ratelimit.ErrNever) {
		t.Errorf("a cost above the limit is the error %v", err)
	}
	if err := (ratelimit.Decision{Denied: "user", RetryAfter: 1}).Err(); errors.Is(err, ratelimit.ErrNever) {
		t.Errorf("a denial is the error %v", err)
	}
	for _, err := range []error{ratelimit.ErrInvalid, ratelimit.ErrNever, ratelimit.ErrWaitTooLong} {
		if got, ok := errors.AsType[coded](err); ok {
			t.Errorf("%v has the code %s", err, got.Code())
		}
	}
}
