package main

import (
	"context"
	"strconv"
	"time"

	"github.com/go-redis/redis_rate/v10"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

const (
	rateLeasedOne = "holdfast, leased, user"
	// rateHot is the number of keys that are asked about all the time.
	rateHot = 10
	// rateStretch is how many decisions are made between two looks at the clock, which costs as much as
	// a decision in memory.
	rateStretch = 64
)

// benchRateLeased compares decisions about hot keys, a trip each, with those from units taken ahead.
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
	r := b.measure(ctx, table{
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
	b.atLeast(20, r.ratio(rateLeasedOne, redisRateOne), "x "+redisRateOne+", "+rateLeasedOne+", hot keys")
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
