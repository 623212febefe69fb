package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2/store/memstore"
	"github.com/ulule/limiter/v3"
	"github.com/ulule/limiter/v3/drivers/store/memory"
	"golang.org/x/time/rate"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// decider makes one decision about a key and reports whether it allowed.
type decider func(ctx context.Context, key string) (bool, error)

var errWrongWay = errors.New("a decision that the workload does not expect")

const plenty = 1 << 29 // a limit that never denies

const bestInMemory = "sethvargo/go-limiter"

// benchRateMemory compares decisions within the process, about many keys.
func benchRateMemory(ctx context.Context, b *bench) {
	const keys = 100_000
	names := make([]string, keys)
	for i := range names {
		names[i] = fmt.Sprintf("user-%06d", i)
	}
	store := must(memorystore.New(&memorystore.Config{Tokens: plenty, Interval: time.Hour}))
	b.atEnd(func() error { return store.Close(context.Background()) })
	ulule := limiter.New(memory.NewStore(), limiter.Rate{Period: time.Hour, Limit: plenty})
	throttled := throttledDecider(must(memstore.NewCtx(4*keys)), plenty, time.Hour)
	var rates rateMap
	user := ratelimit.Limit{Name: "user", Max: plenty, Window: time.Hour}
	ours := must(ratelimit.NewMemory(ratelimit.MemoryConfig{MaxKeys: 4 * keys}))
	t := table{
		title:      fmt.Sprintf("ratelimit in memory, %d keys", keys),
		columns:    []string{"ns/decision", "allocations"},
		yardsticks: []string{bestInMemory},
	}
	for _, c := range []struct {
		name string
		run  decider
	}{
		{"x/time/rate in a map", func(_ context.Context, key string) (bool, error) { return rates.get(key).Allow(), nil }},
		{bestInMemory, func(ctx context.Context, key string) (bool, error) {
			_, _, _, ok, err := store.Take(ctx, key)
			return ok, err
		}},
		{"ulule/limiter", func(ctx context.Context, key string) (bool, error) {
			c, err := ulule.Get(ctx, key)
			return !c.Reached, err
		}},
		{peerThrottled, throttled},
		{rateOurs, func(ctx context.Context, key string) (bool, error) {
			d, err := ours.Allow(ctx, ratelimit.Charge{Limit: user, Key: key})
			return d.Allowed, err
		}},
	} {
		for _, name := range names { // every key is known
			must(c.run(ctx, strings.Clone(name)))
		}
		t.contenders = append(t.contenders, contender{c.name, decisions(c.run, names)})
	}
	r := b.measure(ctx, t)
	b.atMost(1, r.ratio(rateOurs, bestInMemory), "x "+bestInMemory+" in memory")
	b.atMost(0, r.column(rateOurs, 1), "allocations in memory")
}

// decisions measures a decision, and the allocations of one, in a quarter of the
// length: it is nanoseconds that are counted.
func decisions(decide decider, names []string) func(context.Context, time.Duration) sample {
	return func(ctx context.Context, length time.Duration) sample {
		length /= 4
		const stretch = 4096 // between two looks at the clock
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		start := time.Now()
		done := 0
		for time.Since(start) < length && ctx.Err() == nil {
			for range stretch {
				if ok := must(decide(ctx, names[done%len(names)])); !ok {
					check(errWrongWay)
				}
				done++
			}
		}
		took := time.Since(start)
		runtime.ReadMemStats(&after)
		allocations := float64(after.Mallocs-before.Mallocs) / float64(done)
		return sample{float64(took.Nanoseconds()) / float64(done), math.Trunc(100*allocations) / 100}
	}
}

// rateMap is how x/time/rate is used with keys.
type rateMap struct {
	mu    sync.RWMutex
	known map[string]*rate.Limiter
}

func (m *rateMap) get(key string) *rate.Limiter {
	m.mu.RLock()
	l := m.known[key]
	m.mu.RUnlock()
	if l != nil {
		return l
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known == nil {
		m.known = map[string]*rate.Limiter{}
	}
	l = rate.NewLimiter(rate.Every(time.Hour), plenty)
	m.known[key] = l
	return l
}
