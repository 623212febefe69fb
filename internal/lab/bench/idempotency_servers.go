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

// benchRedisKeys measures first runs and replays, with 1 client and with 50. It compares a Store (Begin and
// Complete, or the Begin of a completed key) with the fewest commands that keep a response under a key: without
// token, fingerprint, headers, and a lease that ends before the record. The middleware adds a request with its
// body, the fingerprint, and the response that it holds back.
func benchRedisKeys(ctx context.Context, b *bench) {
	client, store := b.redisKeys(ctx)
	ours, whole := keeper{oursOnServer, onStore(store)}, over(oursOverHTTP, behind(store, reply))
	for _, clients := range []int{1, 50} {
		for _, c := range []struct {
			kind string
			raw  keeper
			as   func(k keeper, clients int) contender
		}{
			{"first run", keeper{rawRedisTwo, rawRedis(client, false)}, keeper.firstRuns},
			{"replay", keeper{rawRedisOne, rawRedis(client, true)}, keeper.replays},
		} {
			title := fmt.Sprintf("%s, clients: %d", c.kind, clients)
			r := b.measure(ctx, table{
				title:      "idempotency on redis, " + title,
				columns:    requestColumns,
				contenders: []contender{c.as(c.raw, clients), c.as(ours, clients), c.as(whole, clients)},
				yardsticks: []string{c.raw.name},
			})
			b.atLeast(0.8, r.ratio(oursOnServer, c.raw.name), fmt.Sprintf("of %s, %s", c.raw.name, title))
		}
	}
}

const thingsTable = "CREATE TABLE things (id bigserial PRIMARY KEY, body bytea);"

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

// rawPostgres looks with a SELECT; a key that is new is claimed with INSERT and answered by UPDATE.
func rawPostgres(pool *pgxpool.Pool) func(ctx context.Context, key idempotency.Key) error {
	return func(ctx context.Context, key idempotency.Key) error {
		var kept []byte
		err := pool.QueryRow(ctx, "SELECT body FROM raw WHERE key = $1", string(key)).Scan(&kept)
		if !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		_, err = pool.Exec(ctx, "INSERT INTO raw (key) VALUES ($1) ON CONFLICT DO NOTHING", string(key))
		if err == nil {
			_, err = pool.Exec(ctx, "UPDATE raw SET body = $2 WHERE key = $1", string(key), body)
		}
		return err
	}
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
