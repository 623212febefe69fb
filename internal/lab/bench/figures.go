package main

import (
	"runtime"
	"time"
)

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// allocations returns how many allocations one call of f costs, on average over n.
func allocations(n int, f func() error) (float64, error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var before, after runtime.MemStats
	for i := range 2 * n {
		if i == n { // the first half is the warm-up
			runtime.ReadMemStats(&before)
		}
		if err := f(); err != nil {
			return 0, err
		}
	}
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / float64(n), nil
}
