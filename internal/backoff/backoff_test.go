package backoff_test

import (
	"math"
	"os"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestDelay(t *testing.T) {
	t.Parallel()
	capLast := backoff.Policy{Base: 50 * time.Millisecond, Max: time.Second, Jitter: 0.5}
	capFirst := backoff.Policy{Base: time.Second, Max: time.Minute, Jitter: 0.2, JitterAfterCap: true}
	full := backoff.Policy{Base: 50 * time.Millisecond, Max: time.Second, Jitter: 0.5, JitterAfterCap: true, Full: true}
	ms := time.Millisecond
	tests := []struct {
		name   string
		policy backoff.Policy
		n      int
		r      float64
		want   time.Duration
	}{
		{"base", capLast, 0, 0.5, 50 * ms},
		{"low jitter", capLast, 1, 0, 50 * ms},
		{"no jitter drawn", capLast, 1, 0.5, 100 * ms},
		{"high jitter", capLast, 3, 0.75, 500 * ms},
		{"bound comes last", capLast, 5, 0.25, 1000 * ms},
		{"below the bound", capLast, 5, 0, 800 * ms},
		{"bound comes first, low", capFirst, 10, 0, 48 * time.Second},
		{"bound comes first, high", capFirst, 10, 0.75, 66 * time.Second},
		{"full, nothing drawn", full, 1, 0, 0},
		{"full, half drawn", full, 1, 0.5, 50 * ms},
		{"full, at the bound", full, 9, 0.75, 750 * ms},
		{"negative n counts as zero", capLast, -3, 0.5, 50 * ms},
		{"huge n stays at the bound", capLast, math.MaxInt, 0.5, time.Second},
		{"huge n without a bound", backoff.Policy{Base: 1}, math.MaxInt, 0.5, math.MaxInt64},
		{"factor three", backoff.Policy{Base: time.Second, Factor: 3}, 2, 0, 9 * time.Second},
		{"factor one", backoff.Policy{Base: time.Second, Factor: 1}, 7, 0, time.Second},
		{"zero policy", backoff.Policy{}, 9, 0.9, 0},
		{"negative base", backoff.Policy{Base: -1}, 1, 0.5, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := tt.policy.Delay(tt.n, tt.r); got != tt.want {
				t.Errorf("Delay(%d, %v) = %v, want %v", tt.n, tt.r, got, tt.want)
			}
		})
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
