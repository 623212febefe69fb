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
	b.atLeast(0.9, r.ratio(rateBoth, rawGathered), "of "+rawGathered+", "+rateBoth)
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
