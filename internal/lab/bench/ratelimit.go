package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/goredisstore.v9"
	"github.com/throttled/throttled/v2/store/memstore"
	"github.com/ulule/limiter/v3"
	"github.com/ulule/limiter/v3/drivers/store/memory"
	ululeredis "github.com/ulule/limiter/v3/drivers/store/redis"
	"golang.org/x/time/rate"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

func ratelimitWorkload() workload {
	return workload{"ratelimit", []part{
		{"memory", benchRateMemory},
		{"redis", benchRateRedis},
		{"leased", benchRateLeased},
	}}
}

// rateOurs is one limit. The table says where it allows.
const rateOurs = "holdfast"

const (
	rateLeasedOne = "holdfast, leased, user"
	// rateHot is the number of keys that are used all the time.
	rateHot = 10
	// rateStretch is how many decisions lie between two reads of the clock, which costs as much as a decision in memory.
	rateStretch = 64
)

// benchRateLeased compares decisions about hot keys with one trip each, and from units taken in advance.
func benchRateLeased(ctx context.Context, b *bench) {
	const goroutines, most, window = 50, 500_000_000, time.Hour
	client := b.redisClient(ctx, goroutines)
	rates := redis_rate.NewLimiter(client)
	rate := redis_rate.Limit{Rate: most, Burst: most, Period: window}
	store := must(ratelimitredis.New(client, ratelimitredis.Config{Prefix: "bench:leased", DenyCache: -1, Timeout: 10 * time.Second}))
	leased := must(ratelimit.NewLeased(store, ratelimit.LeasedConfig{}))
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- leased.Run(running) }()
	b.atEnd(func() error {
		stop()
		return <-ended
	})
	user := ratelimit.Limit{Name: "user", Max: most, Window: window}
	one := func(l ratelimit.Limiter) decider {
		return func(ctx context.Context, key string) (bool, error) {
			d, err := l.Allow(ctx, ratelimit.Charge{Limit: user, Key: key})
			return d.Allowed, err
		}
	}
	b.measure(ctx, table{
		title:   "ratelimit on Redis, 10 hot keys, 50 goroutines",
		columns: []string{"decisions/s", "client us/decision"},
		contenders: []contender{
			{redisRateOne, rateHotLoad(func(ctx context.Context, key string) (bool, error) {
				r, err := rates.Allow(ctx, "hot:"+key, rate)
				return err == nil && r.Allowed > 0, err
			}, goroutines)},
			{rateOne, rateHotLoad(one(store), goroutines)},
			{rateLeasedOne, rateHotLoad(one(leased), goroutines)},
		},
		yardsticks: []string{redisRateOne},
	})
}

func rateHotLoad(decide decider, goroutines int) func(context.Context, time.Duration) sample {
	keys := make([]string, rateHot)
	for i := range keys {
		keys[i] = strconv.Itoa(i)
	}
	return func(ctx context.Context, length time.Duration) sample {
		before := load.CPUTime()
		l := must(load.Drive(ctx, goroutines, length, func(ctx context.Context, worker int) error {
			for n := range rateStretch {
				switch ok, err := decide(ctx, keys[(worker+n)%rateHot]); {
				case err != nil:
					return err
				case !ok:
					return errWrongWay
				}
			}
			return nil
		}))
		return sample{rateStretch * l.Rate, float64((load.CPUTime() - before).Microseconds()) / float64(max(1, rateStretch*l.Done))}
	}
}

// decider makes one decision about a key and reports whether it is allowed.
type decider func(ctx context.Context, key string) (bool, error)

var errWrongWay = errors.New("unexpected decision")

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
		for _, name := range names { // makes every key known
			must(c.run(ctx, strings.Clone(name)))
		}
		t.contenders = append(t.contenders, contender{c.name, decisions(c.run, names)})
	}
	r := b.measure(ctx, t)
	b.atMost(1, r.ratio(rateOurs, bestInMemory), "x "+bestInMemory+" in memory")
}

// decisions measures the time and the allocations of a decision, in a quarter of the length, because a decision takes
// nanoseconds.
func decisions(decide decider, names []string) func(context.Context, time.Duration) sample {
	return func(ctx context.Context, length time.Duration) sample {
		length /= 4
		const stretch = 4096 // between two reads of the clock
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

// rateMap is the usual way to use x/time/rate with keys.
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

// Names of contenders that goals use.
const (
	rawGathered   = "raw EVALSHA by AutoPipeline, one counter"
	redisRateOne  = "redis_rate"
	peerThrottled = "throttled"
	rateOne       = "holdfast, user"
	rateBoth      = "holdfast, user and global"
)

const rateUsers = 1000

// benchRateRedis compares decisions on one Redis.
func benchRateRedis(ctx context.Context, b *bench) {
	const goroutines = 50
	client := b.redisClient(ctx, goroutines)
	t := table{
		title:      fmt.Sprintf("ratelimit on Redis, %d goroutines", goroutines),
		columns:    []string{"decisions/s", "client us/decision"},
		yardsticks: []string{rawGathered, redisRateOne},
	}
	for _, d := range rateDeciders(ctx, client) {
		t.contenders = append(t.contenders, contender{d.name, rateLoad(d.run, goroutines)})
	}
	r := b.measure(ctx, t)
	b.atLeast(2, r.ratio(rateOne, redisRateOne), "x "+redisRateOne+", "+rateOne)
}

type namedDecider struct {
	name string
	run  decider
}

func rateDeciders(ctx context.Context, client *redis.Client) []namedDecider {
	const most, window = 100_000_000, time.Hour
	counter := redis.NewScript(`local n = redis.call('INCRBY', KEYS[1], ARGV[1])
if n == tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return n`)
	check(counter.Load(ctx, client).Err())
	gathered := must(client.AutoPipeline())
	rates := redis_rate.NewLimiter(client)
	limit := redis_rate.Limit{Rate: most, Burst: most, Period: window}
	ulule := limiter.New(must(ululeredis.NewStore(client)), limiter.Rate{Period: window, Limit: most})
	throttled := throttledDecider(must(goredisstore.NewCtx(client, "bench:throttled:")), most, window)
	ours := must(ratelimitredis.New(client, ratelimitredis.Config{Prefix: "bench:shared", DenyCache: -1, Timeout: 10 * time.Second}))
	user := ratelimit.Limit{Name: "user", Max: most, Window: window}
	global := ratelimit.Limit{Name: "global", Max: most, Window: window}
	return []namedDecider{
		{rawGathered, func(ctx context.Context, key string) (bool, error) {
			return true, counter.EvalSha(ctx, gathered, []string{"bench:raw:" + key}, 1, window.Milliseconds()).Err()
		}},
		{redisRateOne, func(ctx context.Context, key string) (bool, error) {
			r, err := rates.Allow(ctx, "one:"+key, limit)
			return err == nil && r.Allowed > 0, err
		}},
		{"ulule/limiter", func(ctx context.Context, key string) (bool, error) {
			c, err := ulule.Get(ctx, key)
			return !c.Reached, err
		}},
		{peerThrottled, throttled},
		{rateOne, func(ctx context.Context, key string) (bool, error) {
			d, err := ours.Allow(ctx, ratelimit.Charge{Limit: user, Key: "one-" + key})
			return d.Allowed, err
		}},
		{rateBoth, func(ctx context.Context, key string) (bool, error) {
			d, err := ours.Allow(ctx, ratelimit.Charge{Limit: user, Key: key}, ratelimit.Charge{Limit: global})
			return d.Allowed, err
		}},
	}
}

// throttledDecider is GCRA by throttled: a read, then a compare-and-swap that is repeated while others are faster. Its
// default of ten repetitions fails on a hot key.
func throttledDecider(store throttled.GCRAStoreCtx, most int64, window time.Duration) decider {
	limiter := must(throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerDuration(int(most), window), MaxBurst: int(most) - 1}))
	limiter.SetMaxCASAttemptsLimit(1 << 20)
	return func(ctx context.Context, key string) (bool, error) {
		limited, _, err := limiter.RateLimitCtx(ctx, key, 1)
		return !limited, err
	}
}

func rateLoad(decide decider, goroutines int) func(context.Context, time.Duration) sample {
	keys := make([]string, rateUsers)
	for i := range keys {
		keys[i] = strconv.Itoa(i)
	}
	return func(ctx context.Context, length time.Duration) sample {
		next := make([]int, 8*goroutines) // far enough apart for a cache line each
		before := load.CPUTime()
		l := must(load.Drive(ctx, goroutines, length, func(ctx context.Context, worker int) error {
			next[8*worker]++
			ok, err := decide(ctx, keys[(worker*37+next[8*worker])%rateUsers])
			if err == nil && !ok {
				err = errWrongWay
			}
			return err
		}))
		return sample{l.Rate, float64((load.CPUTime() - before).Microseconds()) / float64(max(1, l.Done))}
	}
}

// redisClient returns a client with a connection per goroutine.
func (b *bench) redisClient(ctx context.Context, goroutines int) *redis.Client {
	url := b.server(ctx, testenv.Redis, testenv.RedisVar)
	opts := must(redis.ParseURL(url))
	opts.PoolSize, opts.ContextTimeoutEnabled = goroutines, true
	client := redis.NewClient(opts)
	b.atEnd(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		var keys []string
		for _, pattern := range []string{"bench:*", "rate:*", "limiter:*"} {
			found, err := client.Keys(ctx, pattern).Result()
			if err != nil {
				return errors.Join(err, client.Close())
			}
			keys = append(keys, found...)
		}
		var err error
		if len(keys) > 0 {
			err = client.Unlink(ctx, keys...).Err()
		}
		return errors.Join(err, client.Close())
	})
	return client
}
