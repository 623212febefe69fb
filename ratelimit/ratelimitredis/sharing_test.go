package ratelimitredis_test

import (
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// tally is what one limit did in one millisecond of the server's time.
type tally struct{ allowed, denied int64 }

// tallies are those of limits, by their name and the millisecond.
type tallies map[string]map[int64]tally

// Limiters of many processes, each with a client of its own, charge the same limits at once: each of their decisions is what
// the arithmetic says about all that was admitted.
func TestManyClients_decideExactly(t *testing.T) {
	t.Parallel()
	url := redistest.URL(t)
	limits := []ratelimit.Limit{
		{Name: "contended", Max: 20, Window: 2 * time.Second},
		{Name: "day", Max: 100, Window: day},
		{Name: "smooth", Max: 20, Window: 2 * time.Second, Algorithm: ratelimit.TokenBucket, Burst: 5},
	}
	all := chargeTogether(t, url, limits)
	for _, limit := range limits {
		checkTally(t, limit, all[limit.Name])
	}
}

// chargeTogether charges the limits through limiters of several clients, and returns what they decided.
func chargeTogether(t *testing.T, url string, limits []ratelimit.Limit) tallies {
	t.Helper()
	clients, each := 4, 80
	if rounds := testenv.Rounds(t); rounds > 0 {
		clients, each = 50, 20*rounds
	}
	const callers = 4
	all := tallies{}
	for _, limit := range limits {
		all[limit.Name] = map[int64]tally{}
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range clients {
		l := open(t, redistest.Client(t, url), ratelimitredis.Config{DenyCache: -1})
		for caller := range callers {
			wg.Go(func() {
				for n := range each {
					limit := limits[(caller+n)%len(limits)]
					d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: limit})
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					sum := all[limit.Name][d.At.UnixMilli()]
					if d.Allowed {
						sum.allowed++
					} else {
						sum.denied++
					}
					all[limit.Name][d.At.UnixMilli()] = sum
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	return all
}

// checkTally goes through the milliseconds in order: what was admitted up to the end of one must fit, and nothing was denied
// while a unit was free.
func checkTally(t *testing.T, limit ratelimit.Limit, byTime map[int64]tally) {
	t.Helper()
	w := limit.Window.Milliseconds()
	windows := map[int64]int64{}
	missing, since := int64(0), int64(0)
	allowed, denied := int64(0), int64(0)
	for _, at := range slices.Sorted(maps.Keys(byTime)) {
		n := byTime[at]
		allowed, denied = allowed+n.allowed, denied+n.denied
		free := int64(0) // in units times the window
		switch limit.Algorithm {
		case ratelimit.TokenBucket:
			missing = max(0, missing-(at-since)*limit.Max) + n.allowed*w
			since = at
			free = limit.Burst*w - missing
		default:
			windows[at/w] += n.allowed
			free = limit.Max*w - windows[at/w]*w
			if limit.Algorithm == ratelimit.SlidingWindow {
				free -= windows[at/w-1] * (w - at%w)
			}
		}
		if free < 0 {
			t.Fatalf("%s: at %d more was admitted than the limit has: %d too much", limit.Name, at, -free/w+1)
		}
		if n.denied > 0 && free >= w {
			t.Fatalf("%s: at %d %d were denied although %d were free", limit.Name, at, n.denied, free/w)
		}
	}
	t.Logf("%s: %d admitted, %d denied", limit.Name, allowed, denied)
	if denied == 0 || allowed == 0 {
		t.Errorf("%s: %d admitted, %d denied: that proves little", limit.Name, allowed, denied)
	}
}
