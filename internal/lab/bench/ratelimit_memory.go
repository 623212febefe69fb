package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
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

// benchRateMemory compares decisions within the process.
func benchRateMemory(ctx context.Context, b *bench) {
	for _, keys := range []int{1, 100_000} {
		for _, allowed := range []bool{true, false} {
			benchRateMemoryKeys(ctx, b, keys, 1, allowed)
		}
		benchRateMemoryKeys(ctx, b, keys, runtime.GOMAXPROCS(0), true)
	}
}

func benchRateMemoryKeys(ctx context.Context, b *bench, keys, goroutines int, allowed bool) {
	most, what := int64(1), "denied"
	if allowed {
		most, what = plenty, "allowed"
	}
	names := make([]string, keys)
	for i := range names {
		names[i] = fmt.Sprintf("user-%06d", i)
	}
	store := must(memorystore.New(&memorystore.Config{Tokens: uint64(most), Interval: time.Hour}))
	b.atEnd(func() error { return store.Close(context.Background()) })
	ulule := limiter.New(memory.NewStore(), limiter.Rate{Period: time.Hour, Limit: most})
	throttledStore := must(memstore.NewCtx(4 * max(keys, 1000)))
	throttled := throttledDecider(throttledStore, most, time.Hour)
	var rates rateMap
	window := ratelimit.Limit{Name: "user", Max: most, Window: time.Hour}
	bucket := ratelimit.Limit{Name: "tokens", Max: most, Window: time.Hour, Algorithm: ratelimit.TokenBucket}
	global := ratelimit.Limit{Name: "global", Max: plenty, Window: time.Hour}
	var ours [3]*ratelimit.Memory // as each peer has its own
	for i := range ours {
		ours[i] = must(ratelimit.NewMemory(ratelimit.MemoryConfig{MaxKeys: 4 * max(keys, 1000)}))
	}
	contenders := []struct {
		name string
		run  decider
	}{
		{"x/time/rate in a map", func(_ context.Context, key string) (bool, error) { return rates.get(key, int(most)).Allow(), nil }},
		{"sethvargo/go-limiter", func(ctx context.Context, key string) (bool, error) {
			_, _, _, ok, err := store.Take(ctx, key)
			return ok, err
		}},
		{"ulule/limiter", func(ctx context.Context, key string) (bool, error) {
			c, err := ulule.Get(ctx, key)
			return !c.Reached, err
		}},
		{peerThrottled, throttled},
		{rateOurs, func(ctx context.Context, key string) (bool, error) {
			d, err := ours[0].Allow(ctx, ratelimit.Charge{Limit: window, Key: key})
			return d.Allowed, err
		}},
		{"holdfast, token bucket", func(ctx context.Context, key string) (bool, error) {
			d, err := ours[1].Allow(ctx, ratelimit.Charge{Limit: bucket, Key: key})
			return d.Allowed, err
		}},
		{"holdfast, user and global", func(ctx context.Context, key string) (bool, error) {
			d, err := ours[2].Allow(ctx, ratelimit.Charge{Limit: window, Key: key}, ratelimit.Charge{Limit: global})
			return d.Allowed, err
		}},
	}
	t := table{
		title:      fmt.Sprintf("ratelimit in memory, %d keys, %d goroutines, %s", keys, goroutines, what),
		columns:    []column{{name: "ns/decision", decimals: 1}, {name: "allocations", decimals: 2}},
		yardsticks: []string{"sethvargo/go-limiter"},
	}
	for _, c := range contenders {
		for _, name := range names { // every key is known, and used up where that is wanted
			must(c.run(ctx, strings.Clone(name)))
		}
		t.contenders = append(t.contenders, contender{c.name, decisions(c.run, names, goroutines, allowed)})
	}
	r := b.measure(ctx, t)
	if goroutines > 1 {
		return
	}
	for _, c := range contenders[:4] {
		b.atMost(1, r.ratio(rateOurs, c.name), fmt.Sprintf("x %s in memory, %d keys, %s", c.name, keys, what))
	}
	b.atMost(0, r.column(rateOurs, 1), fmt.Sprintf("allocations in memory, %d keys, %s", keys, what))
}

// decisions measures a decision, and the allocations of one, in a quarter of the
// length: it is nanoseconds that are counted.
func decisions(decide decider, names []string, goroutines int, allowed bool) func(context.Context, time.Duration) sample {
	return func(ctx context.Context, length time.Duration) sample {
		length /= 4
		const stretch = 4096 // between two looks at the clock
		var (
			wg    sync.WaitGroup
			total atomic.Int64
			wrong atomic.Bool
			mu    sync.Mutex
			fault error
		)
		note := func(err error) {
			mu.Lock()
			defer mu.Unlock()
			fault = err
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		start := time.Now()
		for g := range goroutines {
			wg.Go(func() {
				done, next := 0, g*len(names)/goroutines
				for ; time.Since(start) < length && ctx.Err() == nil; done += stretch {
					for range stretch {
						ok, err := decide(ctx, names[next])
						if err != nil {
							note(err)
							return
						}
						if ok != allowed {
							wrong.Store(true)
						}
						if next++; next == len(names) {
							next = 0
						}
					}
				}
				total.Add(int64(done))
			})
		}
		wg.Wait()
		took := time.Since(start)
		runtime.ReadMemStats(&after)
		if fault != nil {
			check(fault)
			return nil
		}
		if wrong.Load() {
			check(errWrongWay)
			return nil
		}
		n := float64(total.Load())
		allocations := float64(after.Mallocs-before.Mallocs) / n
		return sample{float64(took.Nanoseconds()) / n, math.Trunc(100*allocations) / 100}
	}
}

// rateMap is how x/time/rate is used with keys.
type rateMap struct {
	mu    sync.RWMutex
	known map[string]*rate.Limiter
}

func (m *rateMap) get(key string, burst int) *rate.Limiter {
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
	l = rate.NewLimiter(rate.Every(time.Hour), burst)
	m.known[key] = l
	return l
}
