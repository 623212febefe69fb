package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// recordLife keeps a shared server from filling up.
const recordLife = 2 * time.Minute

func (b *bench) redisKeys(ctx context.Context) (*redis.Client, *idempotencyredis.Store) {
	url := b.server(ctx, testenv.Redis, testenv.RedisVar)
	opts := must(redis.ParseURL(url))
	opts.PoolSize = 50
	client := redis.NewClient(opts)
	b.atEnd(client.Close)
	store, err := idempotencyredis.New(client, idempotencyredis.Config{Prefix: "bench:idempotency", Retention: recordLife})
	check(err)
	return client, store
}

// benchRedisKeys compares with the fewest commands that keep a response under a key: without token,
// fingerprint, headers, and a lease that ends before the record.
func benchRedisKeys(ctx context.Context, b *bench) {
	client, store := b.redisKeys(ctx)
	b.share(ctx, store, rival{
		server: "redis",
		first:  keeper{rawRedisTwo, rawRedis(client, false)}, replay: keeper{rawRedisOne, rawRedis(client, true)},
		goals: map[string]float64{
			"first run, clients: 1": 0.8, "first run, clients: 50": 0.8, "replay, clients: 1": 0.8, "replay, clients: 50": 0.8,
		},
	})
}

const rawPending = "-"

// rawRedis claims with SET NX, and with get also learns the response by it.
func rawRedis(client *redis.Client, get bool) func(ctx context.Context, key idempotency.Key) error {
	claim := redis.SetArgs{Mode: "NX", Get: get, TTL: recordLife}
	return func(ctx context.Context, key idempotency.Key) error {
		name := "bench:raw:" + string(key)
		old, err := client.SetArgs(ctx, name, rawPending, claim).Result()
		fresh := err == nil && !get || errors.Is(err, redis.Nil) && get
		if fresh {
			return client.Set(ctx, name, body, recordLife).Err()
		}
		if err == nil && old == rawPending {
			err = errors.New("key is in use")
		}
		return err
	}
}

// benchPostgresKeys compares with the fewest statements that do it.
func benchPostgresKeys(ctx context.Context, b *bench) {
	pool := b.postgres(ctx)
	manager := must(txretry.New(pool, txretry.Config{}))
	store := must(idempotencypgx.New(manager, idempotencypgx.Config{Lease: 30 * time.Second}))
	check(store.Migrate(ctx))
	must(pool.Exec(ctx, "CREATE TABLE raw (key text PRIMARY KEY, body bytea)"))
	b.share(ctx, store, rival{
		server: "postgres",
		first:  keeper{rawPostgresTwo, rawPostgres(pool, false)}, replay: keeper{rawPostgresLook, rawPostgres(pool, true)},
		goals: map[string]float64{"first run, clients: 1": 0.85, "first run, clients: 50": 0.85, "replay, clients: 1": 0.8, "replay, clients: 50": 0.8},
	})
}

// rawPostgres claims with INSERT and answers by UPDATE; with look a SELECT comes first.
func rawPostgres(pool *pgxpool.Pool, look bool) func(ctx context.Context, key idempotency.Key) error {
	return func(ctx context.Context, key idempotency.Key) error {
		if look {
			var kept []byte
			err := pool.QueryRow(ctx, "SELECT body FROM raw WHERE key = $1", string(key)).Scan(&kept)
			if !errors.Is(err, pgx.ErrNoRows) {
				return err
			}
		}
		_, err := pool.Exec(ctx, "INSERT INTO raw (key) VALUES ($1) ON CONFLICT DO NOTHING", string(key))
		if err == nil {
			_, err = pool.Exec(ctx, "UPDATE raw SET body = $2 WHERE key = $1", string(key), body)
		}
		return err
	}
}

// twoTiers is a business transaction, alone and under keys in Redis and Postgres.
type twoTiers struct {
	alone, hand, ours http.Handler
	redis             *redis.Client
	statements        *statementCounter // of all
}

func (b *bench) twoTiers(ctx context.Context) (t twoTiers) {
	client, gate := b.redisKeys(ctx)
	pool, statements := b.tieredDatabase(ctx)
	manager := must(txretry.New(pool, txretry.Config{}))
	store := must(idempotencypgx.New(manager, idempotencypgx.Config{Gate: gate}))
	check(store.Migrate(ctx))
	ours := behind(store, doHandler(store))
	return twoTiers{transactionHandler(manager), handKept{pool, client}, ours, client, statements}
}

// benchTiers tells what exactly once costs beside the business transaction alone.
func benchTiers(ctx context.Context, b *bench) {
	t := b.twoTiers(ctx)
	alone, hand, ours := over(transactionOnly, t.alone), over(keptByHand, t.hand), over(oursTwoTiers, t.ours)
	for _, clients := range []int{1, 50} {
		r := b.measure(ctx, table{
			title:      "idempotency on two tiers, clients: " + map[int]string{1: "1", 50: "50"}[clients],
			columns:    requestColumns,
			contenders: []contender{alone.firstRuns(clients), hand.firstRuns(clients), ours.firstRuns(clients), {"holdfast, two tiers, replay", ours.replays(clients).run}},
			yardsticks: []string{transactionOnly, keptByHand},
		})
		b.atLeast(map[int]float64{1: 0.6, 50: 0.65}[clients], r.ratio(oursTwoTiers, transactionOnly), fmt.Sprintf("of the %s, two tiers, clients: %d", transactionOnly, clients))
	}
	b.atMost(1, exactly(t.statements.extra(ctx, alone, ours)), "statements more in the business transaction, two tiers")
}

func insertThing(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "INSERT INTO things (body) VALUES ($1)", body)
	return err
}

func transactionHandler(manager *txretry.Manager) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := manager.Do(r.Context(), insertThing); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		reply.ServeHTTP(w, r)
	})
}

var created = idempotency.Response{Status: http.StatusCreated, Header: http.Header{"Content-Type": {"application/json"}}, Body: body}

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
