package main

import (
	"context"
	"fmt"
	"hash/crc32"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// benchScaleTables records messages in an inbox whose table is split, as its administrator can do, beside one that is not.
func benchScaleTables(ctx context.Context, b *bench) {
	t := table{title: "scale, an inbox entry in a table of partitions"}
	for _, parts := range []int{1, 4, 16} {
		pool := b.postgres(ctx)
		manager := must(txretry.New(pool, txretry.Config{Logger: quiet}))
		store := must(inboxpgx.New(manager, "bench", inboxpgx.Config{Logger: quiet}))
		check(inboxpgx.Handle(store, eventName, func(context.Context, pgx.Tx, string) error { return nil }))
		check(store.Migrate(ctx))
		name := "one table"
		if parts > 1 {
			name = fmt.Sprintf("%d partitions by hash", parts)
			splitInbox(ctx, pool, parts)
		}
		t.contenders = append(t.contenders, b.driven(name, func(ctx context.Context, _ int) error {
			return store.Process(ctx, []*inbox.Message{{ID: ids.New(), Name: eventName, Body: body}})[0]
		}))
	}
	b.measure(ctx, t.only(0, 1, 2))
}

// splitInbox replaces the table by one of so many partitions.
func splitInbox(ctx context.Context, pool *pgxpool.Pool, parts int) {
	for _, sql := range []string{
		`ALTER TABLE holdfast_inbox RENAME TO plain`,
		`CREATE TABLE holdfast_inbox (LIKE plain INCLUDING DEFAULTS, PRIMARY KEY (consumer, message_id)) PARTITION BY HASH (consumer, message_id)`,
		`CREATE INDEX ON holdfast_inbox (consumer, processed_at)`,
	} {
		must(pool.Exec(ctx, sql))
	}
	for n := range parts {
		sql := fmt.Sprintf(`CREATE TABLE entries_%d PARTITION OF holdfast_inbox FOR VALUES WITH (MODULUS %d, REMAINDER %d)`, n, parts, n)
		must(pool.Exec(ctx, sql))
	}
}

// shard is a database with an outbox of its own.
type shard struct {
	pool  *pgxpool.Pool
	store *outboxpgx.Store
}

// benchScaleShards has writers and relays work on one Postgres, and on two: the customer decides which.
func benchScaleShards(ctx context.Context, b *bench) {
	var all []shard
	for range 2 {
		server := b.launch(ctx, testenv.Postgres)
		cfg := must(pgxpool.ParseConfig(server.URL()))
		cfg.MaxConns = maxConns
		pool := b.pool(ctx, cfg)
		store := must(outboxpgx.New(pool, outboxpgx.Config{Logger: quiet}))
		check(store.Migrate(ctx))
		all = append(all, shard{pool, store})
	}
	t := table{
		title:      "scale, a message written and published, by the number of databases",
		contenders: []contender{b.sharded("one Postgres", all[:1]), b.sharded("two Postgres", all)},
	}
	b.measure(ctx, t.only(0, 1, 2, 5))
}

// sharded has each client write for customer after customer, while a relay publishes what is in each shard.
func (b *bench) sharded(name string, shards []shard) contender {
	var customers atomic.Int64
	c := b.driven(name, func(ctx context.Context, _ int) error {
		customer := "customer " + strconv.FormatInt(customers.Add(1)%10_000, 10)
		s := shards[crc32.ChecksumIEEE([]byte(customer))%uint32(len(shards))]
		return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
			return s.store.Write(ctx, tx, outbox.Message{Name: eventName, Key: customer, Body: body})
		})
	})
	return withRelays(c, shards)
}

func withRelays(c contender, shards []shard) contender {
	return contender{c.name, func(ctx context.Context, length time.Duration) sample {
		var relays []func(context.Context) error
		for _, s := range shards {
			relay := must(outbox.NewRelay(s.store, backlog.Confirms{}, outbox.RelayConfig{Logger: quiet}))
			relays = append(relays, relay.Run)
		}
		stop := beside(ctx, relays...)
		result := c.run(ctx, length)
		check(stop())
		return result
	}}
}

// benchScaleCluster has limits and keys kept by one Redis, and by a cluster of three.
func benchScaleCluster(ctx context.Context, b *bench) {
	single := b.launch(ctx, testenv.Redis)
	opts := must(redis.ParseURL(single.URL()))
	one := redis.NewClient(opts)
	b.atEnd(one.Close)
	var nodes []*testenv.Server
	for range 3 {
		node := b.launch(ctx, testenv.Redis, redistest.ClusterFlags...)
		nodes = append(nodes, node)
	}
	three := must(redistest.Join(ctx, nodes))
	b.atEnd(three.Close)
	t := table{title: "scale, limits and keys by the number of Redis"}
	for _, on := range []struct {
		name   string
		client redis.UniversalClient
		tags   []string
	}{
		{"one Redis", one, []string{""}},
		{"a cluster of three", three, []string{"rl"}},
		{"a cluster of three, 16 tags", three, tagNames(16)},
	} {
		limiters := scaleLimiters(on.client, on.tags...)
		t.contenders = append(t.contenders, b.driven("a limit for each user, "+on.name, limitUsers(limiters)))
	}
	for _, on := range []struct {
		name   string
		client redis.UniversalClient
	}{{"one Redis", one}, {"a cluster of three", three}} {
		keys := must(idempotencyredis.New(on.client, idempotencyredis.Config{Prefix: "bench:scale", Retention: recordLife}))
		keyed := behind(keys, reply)
		t.contenders = append(t.contenders, b.driven("a key, "+on.name, func(ctx context.Context, _ int) error { return send(ctx, keyed, idempotency.NewKey()) }))
	}
	b.measure(ctx, t.only(0, 1, 4, 5))
}

func tagNames(n int) (names []string) {
	for i := range n {
		names = append(names, "rl"+strconv.Itoa(i))
	}
	return names
}
