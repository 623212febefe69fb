//go:build !race

package idempotency_test

import "testing"

// The middleware with a store in memory may make 12 allocations more than the handler alone.
func TestMiddlewareAllocations(t *testing.T) {
	const runs, most = 1000, 12
	bare, protected := newBench(t, false), newBench(t, true)
	all := keys(runs + 1)
	base := testing.AllocsPerRun(runs, func() { bare.send(all[0]) })
	i := 0
	first := testing.AllocsPerRun(runs, func() { protected.send(all[i]); i++ })
	replay := testing.AllocsPerRun(runs, func() { protected.send(all[0]) })
	if first-base > most || replay-base > most {
		t.Errorf("first run %v, replay %v, bare handler %v allocations; want at most %d more", first, replay, base, most)
	}
}
