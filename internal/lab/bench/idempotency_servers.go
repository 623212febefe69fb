package main

import (
	"context"
	"errors"
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

func (b *bench) redisKeys(ctx context.Context) (*redis.Client, *idempotencyredis.Store, error) {
	url, err := b.server(ctx, testenv.Redis, testenv.RedisVar)
	if err != nil {
		return nil, nil, err
	}
	opts, err := redis.ParseURL(url)
	if err != nil {
		return nil, nil, err
	}
	opts.PoolSize = 50
	client := redis.NewClient(opts)
	b.atEnd(client.Close)
	store, err := idempotencyredis.NewStore(client, idempotencyredis.Config{Prefix: "bench:idempotency", Retention: recordLife})
	return client, store, err
}

// benchRedisKeys compares with the fewest commands that keep a response under a key: without token,
// fingerprint, headers, and a lease that ends before the record.
func benchRedisKeys(ctx context.Context, b *bench) error {
	client, store, err := b.redisKeys(ctx)
	if err != nil {
		return err
	}
	handler, err := behind(store, reply)
	if err != nil {
		return err
	}
	return b.share(ctx, "redis",
		protected{rawRedisTwo, rawRedis(client, false)}, protected{rawRedisOne, rawRedis(client, true)}, protected{oursOnRedis, handler},
		map[int]float64{1: 0.92, 50: 0.82}, map[int]float64{1: 0.9, 50: 0.9})
}

const rawPending = "-"

// rawRedis claims with SET NX, and with get also learns the response by it.
func rawRedis(client *redis.Client, get bool) http.Handler {
	claim := redis.SetArgs{Mode: "NX", Get: get, TTL: recordLife}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := "bench:raw:" + r.Header.Get(idempotency.Header)
		old, err := client.SetArgs(r.Context(), key, rawPending, claim).Result()
		fresh := err == nil && !get || errors.Is(err, redis.Nil) && get
		switch {
		case fresh:
			err = client.Set(r.Context(), key, body, recordLife).Err()
		case err == nil && old != rawPending:
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write([]byte(old))
			return
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		reply.ServeHTTP(w, r)
	})
}

// benchPostgresKeys compares with the fewest statements that do it.
func benchPostgresKeys(ctx context.Context, b *bench) error {
	pool, err := b.postgres(ctx)
	if err != nil {
		return err
	}
	if err := idempotencypgx.Migrate(ctx, pool, idempotencypgx.SchemaConfig{}); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, "CREATE TABLE raw (key text PRIMARY KEY, body bytea)"); err != nil {
		return err
	}
	store, err := idempotencypgx.NewStore(pool, idempotencypgx.Config{})
	if err != nil {
		return err
	}
	handler, err := behind(store, reply)
	if err != nil {
		return err
	}
	return b.share(ctx, "postgres",
		protected{rawPostgresTwo, rawPostgres(pool, false)}, protected{rawPostgresLook, rawPostgres(pool, true)}, protected{oursOnPostgres, handler},
		nil, map[int]float64{1: 0.8, 50: 0.8})
}

// rawPostgres claims with INSERT and answers by UPDATE; with look a SELECT comes first.
func rawPostgres(pool *pgxpool.Pool, look bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := r.Header.Get(idempotency.Header)
		if look {
			var kept []byte
			if err := pool.QueryRow(r.Context(), "SELECT body FROM raw WHERE key = $1", key).Scan(&kept); err == nil {
				w.WriteHeader(http.StatusCreated)
				_, _ = w.Write(kept)
				return
			}
		}
		_, err := pool.Exec(r.Context(), "INSERT INTO raw (key) VALUES ($1) ON CONFLICT DO NOTHING", key)
		if err == nil {
			_, err = pool.Exec(r.Context(), "UPDATE raw SET body = $2 WHERE key = $1", key, body)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		reply.ServeHTTP(w, r)
	})
}

// benchTiers tells what exactly once costs beside the business transaction alone.
func benchTiers(ctx context.Context, b *bench) error {
	_, gate, err := b.redisKeys(ctx)
	if err != nil {
		return err
	}
	pool, statements, err := b.tieredDatabase(ctx)
	if err != nil {
		return err
	}
	manager, err1 := txretry.New(pool, txretry.Config{})
	records, err2 := idempotencypgx.NewRecords(pool, idempotencypgx.RecordsConfig{})
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	runner, err := idempotencypgx.NewRunner(manager, records, gate, idempotencypgx.RunnerConfig{})
	if err != nil {
		return err
	}
	tiers, err := behind(gate, tiersHandler(runner))
	if err != nil {
		return err
	}
	alone := protected{transactionOnly, transactionHandler(manager)}
	ours := protected{oursTwoTiers, tiers}
	for _, clients := range []int{1, 50} {
		_, err := b.measure(ctx, table{
			title:      "idempotency on two tiers, clients: " + map[int]string{1: "1", 50: "50"}[clients],
			columns:    requestColumns,
			contenders: []contender{alone.firstRuns(clients), ours.firstRuns(clients), {"holdfast, two tiers, replay", ours.replays(clients).run}},
			yardsticks: []string{transactionOnly},
		})
		if err != nil {
			return err
		}
	}
	extra, err := statements.extra(ctx, alone, ours)
	b.atMost(1, exactly(extra), "statements more in the business transaction, two tiers")
	return err
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

func tiersHandler(runner *idempotencypgx.Runner) http.Handler {
	resp := idempotency.Response{Status: http.StatusCreated, Header: http.Header{"Content-Type": {"application/json"}}, Body: body}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := runner.Run(r.Context(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return resp, insertThing(ctx, tx)
		})
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
}
