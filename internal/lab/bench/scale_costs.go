package main

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/txretry"
)

// benchScaleMessages is what a message costs each server on its way: the write, the relay, the consumer.
func benchScaleMessages(ctx context.Context, b *bench) {
	i := newIntake(ctx, b)
	s := &streamIntake{i, "holdfast_bench_" + strconv.FormatInt(time.Now().UnixNano(), 10)}
	b.atEnd(func() error { return s.clear(context.WithoutCancel(ctx)) })
	var out []contender
	for _, kind := range queueKinds {
		d := newDrain(ctx, b, kind.args)
		if len(out) == 0 {
			out = append(out, b.driven("written, a transaction each", d.writeOne), d.contender("relay to a Redis stream", 1, d.toStream(i)))
		}
		out = append(out, d.contender("relay to a "+kind.name+" queue", 1, d.holdfast(0)))
	}
	b.measure(ctx, table{
		title:   fmt.Sprintf("scale, what a message of %d bytes costs", len(body)),
		columns: sampleColumns[:5],
		contenders: append(out,
			i.contender("consumer of a classic queue, a transaction each, 8 workers", 8, i.holdfast(8, 1, i.perMessage)),
			i.contender("consumer of a classic queue, a batch handler", 1, i.holdfast(1, 200, i.batchHandler)),
			s.contender("consumer of a Redis stream, a transaction each, 8 workers", 8, s.holdfast(8, 1, i.perMessage)),
			s.contender("consumer of a Redis stream, a batch handler", 1, s.holdfast(1, 200, i.batchHandler)),
		),
	})
}

func (d *drain) writeOne(ctx context.Context, _ int) error {
	return pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error { return d.store.Write(ctx, tx, d.message()) })
}

// toStream drains to a Redis stream.
func (d *drain) toStream(i *intake) drainRun {
	return func(ctx context.Context, n int, watch *stopwatch) int {
		d.fill(ctx, n, 0)
		stream := "bench:" + d.queue
		publisher := must(outboxredis.NewPublisher(i.redis, outboxredis.Config{Stream: stream}))
		check(d.relay(ctx, publisher, n, watch))
		check(i.redis.Unlink(ctx, stream).Err())
		return 0
	}
}

// benchScaleRequests is what a request costs each server: its key, its limits, and the transaction itself.
func benchScaleRequests(ctx context.Context, b *bench) {
	client, gate := b.redisKeys(ctx)
	pool := b.postgres(ctx)
	must(pool.Exec(ctx, thingsTable))
	manager := must(txretry.New(pool, txretry.Config{}))
	store := must(idempotencypgx.New(manager, idempotencypgx.Config{Gate: gate}))
	check(store.Migrate(ctx))
	limiter := scaleLimiters(client, "")
	over := func(h http.Handler) func(context.Context, int) error {
		return func(ctx context.Context, _ int) error { return send(ctx, h, idempotency.NewKey()) }
	}
	b.measure(ctx, table{
		title:   "scale, what a request costs",
		columns: sampleColumns[:5],
		contenders: []contender{
			b.driven("a transaction with one INSERT", over(transactionHandler(manager))),
			b.driven("the same under a key, two tiers", over(behind(store, doHandler(store)))),
			b.driven("a limit for each user", limitUsers(limiter)),
			b.driven("a limit for each user and one for all", limitUsers(limiter, ratelimit.Charge{Limit: everybody})),
		},
	})
}

func doHandler(store *idempotencypgx.Store) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := store.Do(r.Context(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return created, insertThing(ctx, tx)
		})
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
}

// everybody is one counter, whoever asks.
var everybody = ratelimit.Limit{Name: "all", Max: 100_000_000, Window: time.Hour}

// limitUsers counts another user each time, and further charges. A user's limiter is always the same one.
func limitUsers(limiters []*ratelimitredis.Limiter, further ...ratelimit.Charge) func(context.Context, int) error {
	user := ratelimit.Limit{Name: "user", Max: 1_000_000, Window: time.Hour}
	var next atomic.Int64
	return func(ctx context.Context, _ int) error {
		n := next.Add(1) % rateUsers
		charge := ratelimit.Charge{Limit: user, Key: strconv.FormatInt(n, 10)}
		_, err := limiters[n%int64(len(limiters))].Allow(ctx, append([]ratelimit.Charge{charge}, further...)...)
		return err
	}
}

// scaleLimiters returns one limiter for each tag. The busy servers here have time to answer.
func scaleLimiters(client redis.UniversalClient, tags ...string) (all []*ratelimitredis.Limiter) {
	for _, tag := range tags {
		l := must(ratelimitredis.New(client, ratelimitredis.Config{Prefix: "bench:scale", Tag: tag, Timeout: 10 * time.Second}))
		all = append(all, l)
	}
	return all
}
