package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/goredisstore.v9"
	"github.com/ulule/limiter/v3"
	ululeredis "github.com/ulule/limiter/v3/drivers/store/redis"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// Names of contenders that goals refer to.
const (
	rawCounter    = "raw EVALSHA, one counter"
	rawGathered   = "raw EVALSHA by AutoPipeline, one counter"
	redisRateOne  = "redis_rate"
	redisRateTwo  = "redis_rate, user, then global"
	peerThrottled = "throttled"
	rateOne       = "holdfast, user"
	rateBoth      = "holdfast, user and global"
	rateEach      = "holdfast, user and global, a call each"
	rateCached    = "holdfast, user and global, remembered"
)

const rateUsers = 1000

// benchRateRedis compares decisions on one Redis.
func benchRateRedis(allowed bool) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		for _, goroutines := range []int{1, 50} {
			benchRateRedisBy(ctx, b, goroutines, allowed)
		}
	}
}

func benchRateRedisBy(ctx context.Context, b *bench, goroutines int, allowed bool) {
	client := b.redisClient(ctx, goroutines)
	most, what := int64(1), "denied"
	if allowed {
		most, what = 100_000_000, "allowed"
	}
	deciders := rateDeciders(client, most, goroutines)
	t := table{
		title:      fmt.Sprintf("ratelimit on Redis, %d goroutines, %s", goroutines, what),
		columns:    []column{{name: "decisions/s"}, {name: "client us/decision", decimals: 1}},
		yardsticks: []string{rawCounter, rawGathered, redisRateOne, redisRateTwo},
	}
	for _, d := range deciders {
		if allowed && d.name == rateCached || goroutines == 1 && d.name == rateEach { // of one goroutine all have one
			continue
		}
		for user := range rateUsers { // uses up what is to be denied
			must(d.run(ctx, strconv.Itoa(user)))
		}
		t.contenders = append(t.contenders, contender{d.name, rateLoad(d, goroutines, allowed)})
	}
	r := b.measure(ctx, t)
	if !allowed {
		return
	}
	at := fmt.Sprintf(", %d goroutines", goroutines)
	b.atLeast(0.65, r.ratio(rateBoth, rawCounter), "of "+rawCounter+", "+rateBoth+at)
	b.atLeast(1.4, r.ratio(rateBoth, redisRateTwo), "x "+redisRateTwo+", "+rateBoth+at)
	if goroutines > 1 {
		b.atLeast(0.6, r.ratio(rateEach, rawCounter), "of "+rawCounter+", "+rateEach+at)
		b.atLeast(0.9, r.ratio(rateBoth, rawGathered), "of "+rawGathered+", "+rateBoth+at)
		b.atLeast(2, r.ratio(rateBoth, redisRateOne), "x "+redisRateOne+", "+rateBoth+at)
		b.atLeast(2, r.ratio(rateOne, redisRateOne), "x "+redisRateOne+", "+rateOne+at)
	}
}

type namedDecider struct {
	name string
	run  decider
	free bool // it denies nothing
	// each has a decider for each goroutine, in place of run for all of them. Optional.
	each []decider
}

// of is the decider of a goroutine.
func (d namedDecider) of(worker int) decider {
	if d.each == nil {
		return d.run
	}
	return d.each[worker]
}

func rateDeciders(client *redis.Client, most int64, goroutines int) []namedDecider {
	const window = time.Hour
	counter := redis.NewScript(`local n = redis.call('INCRBY', KEYS[1], ARGV[1])
if n == tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return n`)
	rates := redis_rate.NewLimiter(client)
	limit := redis_rate.Limit{Rate: int(most), Burst: int(most), Period: window}
	wide := redis_rate.Limit{Rate: 100_000_000, Burst: 100_000_000, Period: window}
	store := must(ululeredis.NewStore(client))
	ulule := limiter.New(store, limiter.Rate{Period: window, Limit: most})
	throttledStore := must(goredisstore.NewCtx(client, "bench:throttled:"))
	throttled := throttledDecider(throttledStore, most, window)
	shared := must(ratelimitredis.New(client, ratelimitredis.Config{Prefix: "bench:shared", DenyCache: -1, Timeout: 10 * time.Second}))
	cached := must(ratelimitredis.New(client, ratelimitredis.Config{Prefix: "bench:cached", Timeout: 10 * time.Second}))
	gathered := must(client.AutoPipeline())
	evalsha := func(by redis.Scripter) decider {
		return func(ctx context.Context, key string) (bool, error) {
			return true, counter.EvalSha(ctx, by, []string{"bench:raw:" + key}, 1, window.Milliseconds()).Err()
		}
	}
	user := ratelimit.Limit{Name: "user", Max: most, Window: window}
	global := ratelimit.Limit{Name: "global", Max: 100_000_000, Window: window}
	one := func(l *ratelimitredis.Limiter) decider {
		return func(ctx context.Context, key string) (bool, error) {
			d, err := l.Allow(ctx, ratelimit.Charge{Limit: user, Key: "one-" + key})
			return d.Allowed, err
		}
	}
	both := func(l *ratelimitredis.Limiter) decider {
		return func(ctx context.Context, key string) (bool, error) {
			d, err := l.Allow(ctx, ratelimit.Charge{Limit: user, Key: key}, ratelimit.Charge{Limit: global})
			return d.Allowed, err
		}
	}
	each := make([]decider, goroutines) // by a limiter each nothing travels together, as from so many processes
	for i := range each {
		own := must(ratelimitredis.New(client, ratelimitredis.Config{Prefix: "bench:each", DenyCache: -1, Timeout: 10 * time.Second}))
		each[i] = both(own)
	}
	check(counter.Load(context.Background(), client).Err())
	return []namedDecider{
		{name: rawCounter, run: evalsha(client), free: true},
		{name: rawGathered, run: evalsha(gathered), free: true},
		{name: redisRateOne, run: func(ctx context.Context, key string) (bool, error) {
			r, err := rates.Allow(ctx, "one:"+key, limit)
			return err == nil && r.Allowed > 0, err
		}},
		{name: redisRateTwo, run: func(ctx context.Context, key string) (bool, error) {
			r, err := rates.Allow(ctx, "two:"+key, limit)
			if err != nil || r.Allowed == 0 {
				return false, err
			}
			r, err = rates.Allow(ctx, "global", wide)
			return err == nil && r.Allowed > 0, err
		}},
		{name: "ulule/limiter", run: func(ctx context.Context, key string) (bool, error) {
			c, err := ulule.Get(ctx, key)
			return !c.Reached, err
		}},
		{name: peerThrottled, run: throttled},
		{name: rateOne, run: one(shared)},
		{name: rateEach, run: each[0], each: each},
		{name: rateBoth, run: both(shared)},
		{name: rateCached, run: both(cached)},
	}
}

// throttledDecider is GCRA by throttled: a read, then a compare and swap, which is repeated for as long as others are faster.
// The ten times of its default fail on a hot key.
func throttledDecider(store throttled.GCRAStoreCtx, most int64, window time.Duration) decider {
	limiter := must(throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerDuration(int(most), window), MaxBurst: int(most) - 1}))
	limiter.SetMaxCASAttemptsLimit(1 << 20)
	return func(ctx context.Context, key string) (bool, error) {
		limited, _, err := limiter.RateLimitCtx(ctx, key, 1)
		return !limited, err
	}
}

func rateLoad(d namedDecider, goroutines int, allowed bool) func(context.Context, time.Duration) sample {
	keys := make([]string, rateUsers)
	for i := range keys {
		keys[i] = strconv.Itoa(i)
	}
	return func(ctx context.Context, length time.Duration) sample {
		next := make([]int, 8*goroutines) // far enough apart for a cache line each
		before := load.CPUTime()
		l := must(load.Drive(ctx, goroutines, length, func(ctx context.Context, worker int) error {
			next[8*worker]++
			ok, err := d.of(worker)(ctx, keys[(worker*37+next[8*worker])%rateUsers])
			if err == nil && ok != allowed && !d.free {
				err = errWrongWay
			}
			return err
		}))
		return sample{l.Rate, float64((load.CPUTime() - before).Microseconds()) / float64(max(1, l.Done))}
	}
}

// benchRateCached measures what a denied request costs that is known to be.
func benchRateCached(ctx context.Context, b *bench) {
	client := b.redisClient(ctx, 1)
	deciders := rateDeciders(client, 1, 1)
	cached := deciders[len(deciders)-1]
	for range 2 {
		must(cached.run(ctx, "flood"))
	}
	r := b.measure(ctx, table{
		title:      "ratelimit on Redis, denied and remembered, 1 goroutine",
		columns:    []column{{name: "ns/decision", decimals: 1}, {name: "allocations", decimals: 2}},
		contenders: []contender{{cached.name, decisions(cached.run, []string{"flood"}, 1, false)}},
	})
	b.atMost(150, r.column(cached.name, 0), "ns for a denial that is remembered, user and global")
}

// redisClient returns a client with a connection for each
// goroutine.
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
