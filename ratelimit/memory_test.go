package ratelimit_test

import (
	"fmt"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest/conformance"
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
	conformance.Test(t, func(t *testing.T) ratelimit.Reserver { return newMemory(t) }, synctest.Test)
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

// A flood of new keys must not make room by forgetting the shared counter.
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

func TestPeekChargesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMemory(t)
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 1}}
		for range 3 {
			if d, err := m.Peek(t.Context(), c); err != nil || !d.Allowed || d.Charges() != nil {
				t.Errorf("got %+v, %v", d, err)
			}
		}
		if d, err := m.Allow(t.Context(), c); err != nil || !d.Allowed {
			t.Errorf("got %+v, %v", d, err)
		}
		if d, err := m.Peek(t.Context(), c); err != nil || d.Allowed || d.RetryAfter <= time.Minute {
			t.Errorf("got %+v, %v", d, err)
		}
	})
}

func BenchmarkMemoryAllow(b *testing.B) {
	m, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	if err != nil {
		b.Fatal(err)
	}
	user := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 1 << 20}, Key: "42"}
	global := ratelimit.Charge{Limit: ratelimit.Limit{Name: "global", Max: 1 << 20}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.Allow(b.Context(), user, global); err != nil {
			b.Fatal(err)
		}
	}
}
