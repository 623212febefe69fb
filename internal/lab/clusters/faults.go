package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// outage is how long a fault lasts that has an end: longer than any cluster here takes to notice it.
const outage = 20 * time.Second

// faults happen to the clusters and their hosts. The failover of Postgres is the last: no standby is left then.
func (t *trial) faults() []harness.Fault {
	h := t.house
	whole := func(well func(context.Context) error) func(context.Context) error { // until the cluster is again what it was
		return func(ctx context.Context) error { return harness.Poll(ctx, well) }
	}
	killed := func(kind testenv.Kind, target string, find func() *testenv.Server, well func(context.Context) error) harness.Fault {
		var victim *testenv.Server
		return harness.Fault{
			Kind: string(kind), Target: target + " killed", Lasts: outage, After: whole(well),
			Begin: func(context.Context) error {
				if victim = find(); victim == nil {
					return errors.New("there is no such server")
				}
				return victim.Kill()
			},
			End: func(ctx context.Context) error { return victim.Start(ctx) },
		}
	}
	third := h.servers[2]
	return []harness.Fault{
		killed(testenv.Redis, "the primary of the rate limits", func() *testenv.Server { return h.redisPrimary(limitsKey) }, h.redisWell),
		{Kind: "redis", Target: "the slot of the rate limits moved", Begin: func(ctx context.Context) error { return h.moveSlot(ctx, limitsKey) }},
		killed(testenv.RabbitMQ, "the leader of the shop's queue", func() *testenv.Server { return h.leader(shopQueue) }, h.brokersJoined),
		killed(testenv.RabbitMQ, "a follower", func() *testenv.Server { return h.follower(shopQueue) }, h.brokersJoined),
		{
			Kind: "rabbitmq", Target: "a node cut off from the others, clients reach it", Lasts: outage, After: whole(h.allWell),
			Begin: func(ctx context.Context) error { return third.CutFrom(ctx, h.servers[:2]...) },
			End:   func(ctx context.Context) error { return third.HealTo(ctx, h.servers[:2]...) },
		},
		{Kind: "host", Target: "of servers cut off", Lasts: outage, Begin: third.Cut, End: third.Heal, After: whole(h.allWell)},
		{Kind: "host", Target: "of the shop cut off", Lasts: outage, Begin: h.apps[1].Cut, End: h.apps[1].Heal},
		{Kind: "pgbouncer", Target: "of a host killed", Lasts: outage, Begin: func(context.Context) error { return h.poolers[0].Kill() }, End: h.poolers[0].Start},
		killed(testenv.Postgres, "the synchronous standby", func() *testenv.Server { return h.standby }, h.synchronous),
		{Kind: "postgres", Target: "the primary killed, the standby promoted", Begin: h.failOver},
	}
}

const (
	// limitsKey is in the slot of all rate limits.
	limitsKey = "{rl}"
	// shopQueue is the consumers' queue.
	shopQueue = "reservation.stats"
)

// eachRedis calls do with every node that answers, and what it says of itself.
func (h *house) eachRedis(ctx context.Context, do func(s *testenv.Server, c *redis.Client)) {
	for _, s := range h.redis {
		opts, err := redis.ParseURL(s.URL())
		if err != nil {
			continue
		}
		opts.MaxRetries, opts.DialTimeout = -1, 2*time.Second
		c := redis.NewClient(opts)
		do(s, c)
		_ = c.Close()
	}
}

// redisPrimary is the node that answers for a key; nil if none says so.
func (h *house) redisPrimary(key string) (found *testenv.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	h.eachRedis(ctx, func(s *testenv.Server, c *redis.Client) {
		if err := c.Exists(ctx, key).Err(); err == nil {
			found = s
		}
	})
	return found
}

// moveSlot takes the slot of a key to another primary and back, as redis-cli --cluster reshard does.
func (h *house) moveSlot(ctx context.Context, key string) error {
	var addresses []string
	for _, s := range h.redis {
		addresses = append(addresses, addressOf(s.URL()))
	}
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addresses})
	defer cluster.Close()
	slot, err := cluster.ClusterKeySlot(ctx, key).Result()
	if err != nil {
		return err
	}
	from := h.redisPrimary(key)
	var to *testenv.Server
	h.eachRedis(ctx, func(s *testenv.Server, c *redis.Client) {
		role, err := c.Do(ctx, "ROLE").Slice()
		if err == nil && len(role) > 0 && role[0] == "master" && s != from {
			to = s
		}
	})
	if from == nil || to == nil {
		return errors.New("there are no two primaries")
	}
	if err := moveSlot(ctx, slot, from, to); err != nil {
		return err
	}
	_ = runloop.Sleep(ctx, 5*time.Second)
	return moveSlot(ctx, slot, to, from)
}

// steps of a move are apart, so that requests come in between.
const stepPause = 500 * time.Millisecond

func moveSlot(ctx context.Context, slot int64, from, to *testenv.Server) error {
	a, b, err := twoClients(from, to)
	if err != nil {
		return err
	}
	defer a.Close()
	defer b.Close()
	fromID, err1 := a.Do(ctx, "CLUSTER", "MYID").Text()
	toID, err2 := b.Do(ctx, "CLUSTER", "MYID").Text()
	err = errors.Join(err1, err2,
		b.Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", fromID).Err(),
		a.Do(ctx, "CLUSTER", "SETSLOT", slot, "MIGRATING", toID).Err())
	if err != nil {
		return err
	}
	_ = runloop.Sleep(ctx, stepPause)
	host, port, _ := strings.Cut(b.Options().Addr, ":")
	for {
		keys, err := a.ClusterGetKeysInSlot(ctx, int(slot), 100).Result()
		if err != nil {
			return err
		}
		if len(keys) == 0 {
			break
		}
		for _, k := range keys {
			if err := a.Migrate(ctx, host, port, k, 0, 5*time.Second).Err(); err != nil {
				return err
			}
		}
	}
	_ = runloop.Sleep(ctx, stepPause)
	return errors.Join(
		b.Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", toID).Err(),
		a.Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", toID).Err())
}

func twoClients(from, to *testenv.Server) (a, b *redis.Client, err error) {
	first, err1 := redis.ParseURL(from.URL())
	second, err2 := redis.ParseURL(to.URL())
	if err := errors.Join(err1, err2); err != nil {
		return nil, nil, err
	}
	return redis.NewClient(first), redis.NewClient(second), nil
}

// redisWell fails unless every node sees a whole cluster with its replicas.
func (h *house) redisWell(ctx context.Context) error {
	bad := errors.New("no node of Redis answers")
	replicas, answered := 0, 0
	h.eachRedis(ctx, func(_ *testenv.Server, c *redis.Client) {
		info, err := c.ClusterInfo(ctx).Result()
		if err == nil && strings.Contains(info, "cluster_state:ok") {
			answered++
		}
		if link, err := c.Info(ctx, "replication").Result(); err == nil && strings.Contains(link, "master_link_status:up") {
			replicas++
		}
	})
	if answered < len(h.redis) || replicas < len(h.redis)/2 {
		return fmt.Errorf("%w: %d of %d, %d replicas", bad, answered, len(h.redis), replicas)
	}
	return nil
}

// leader is the node that leads a quorum queue; nil if nobody knows.
func (h *house) leader(queue string) *testenv.Server { return h.member(queue, true) }

// follower is one that does not.
func (h *house) follower(queue string) *testenv.Server { return h.member(queue, false) }

func (h *house) member(queue string, leads bool) *testenv.Server {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, s := range h.rabbit {
		var q struct{ Leader string }
		if askBroker(ctx, s, "/api/queues/%2F/"+queue, &q) != nil || q.Leader == "" {
			continue
		}
		for i, host := range h.servers {
			if (q.Leader == "holdfast@"+host.Address) == leads {
				return h.rabbit[i]
			}
		}
	}
	return nil
}

// allWell fails unless every cluster is whole.
func (h *house) allWell(ctx context.Context) error {
	errs := make([]error, 3)
	var asking sync.WaitGroup
	for i, well := range []func(context.Context) error{h.brokersJoined, h.redisWell, h.synchronous} {
		asking.Go(func() { errs[i] = well(ctx) })
	}
	asking.Wait()
	return errors.Join(errs...)
}

// failOver is what an operator does when the primary is lost: the standby becomes the primary, which waits for nobody now,
// and takes its address.
func (h *house) failOver(ctx context.Context) error {
	if err := h.primary.Kill(); err != nil {
		return err
	}
	if err := h.servers[0].Drop(ctx, h.address); err != nil {
		return err
	}
	if err := h.standby.Promote(ctx); err != nil {
		return err
	}
	if err := onPostgres(ctx, h.standby.URL(), "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()"); err != nil {
		return err
	}
	return h.servers[1].Take(ctx, h.address)
}
