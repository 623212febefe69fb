package redistest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// ClusterFlags are what a node of Join is started with. What a busy machine does is no failure.
var ClusterFlags = []string{"--cluster-enabled", "yes", "--cluster-node-timeout", "10000"}

// Cluster returns a client of a Redis Cluster of three private nodes without
// replicas, and the nodes. All is gone when the test ends.
func Cluster(t testing.TB) (*redis.ClusterClient, []*testenv.Server) {
	t.Helper()
	var servers []*testenv.Server
	for range 3 {
		servers = append(servers, testenv.Private(t, testenv.Redis, ClusterFlags...))
	}
	client, err := Join(t.Context(), servers)
	if err != nil {
		t.Fatalf("redistest: cluster: %v", err)
	}
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Errorf("redistest: %v", err)
		}
	})
	return client, servers
}

// Join makes a Redis Cluster without replicas of servers that were started with ClusterFlags, and returns a client
// of it, for the caller to close.
func Join(ctx context.Context, servers []*testenv.Server) (_ *redis.ClusterClient, err error) {
	const slots = 16384
	var clients []*redis.Client
	defer func() {
		for _, c := range clients {
			err = errors.Join(err, c.Close())
		}
	}()
	var addrs []string
	for n, s := range servers {
		opts, err := redis.ParseURL(s.URL())
		if err != nil {
			return nil, err
		}
		c := redis.NewClient(opts)
		clients, addrs = append(clients, c), append(addrs, opts.Addr)
		if err := c.ClusterAddSlotsRange(ctx, n*slots/len(servers), (n+1)*slots/len(servers)-1).Err(); err != nil {
			return nil, err
		}
	}
	for _, addr := range addrs[1:] {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		if err := clients[0].ClusterMeet(ctx, host, port).Err(); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, testenv.Patience)
	defer cancel()
	for _, c := range clients {
		if err := awaitNodes(ctx, c, len(servers)); err != nil {
			return nil, err
		}
	}
	return redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs}), nil
}

// awaitNodes waits until the node knows so many and serves all slots.
func awaitNodes(ctx context.Context, c *redis.Client, nodes int) error {
	for {
		info, err := c.ClusterInfo(ctx).Result()
		if err == nil && strings.Contains(info, "cluster_state:ok") && strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d", nodes)) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("cluster not ready: %w: %s", cmp.Or(err, ctx.Err()), info)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// NodesInUse returns how many nodes of a cluster hold keys.
func NodesInUse(ctx context.Context, client *redis.ClusterClient) (int64, error) {
	var used atomic.Int64
	err := client.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
		n, err := node.DBSize(ctx).Result()
		if n > 0 {
			used.Add(1)
		}
		return err
	})
	return used.Load(), err
}

// Failover returns a client of a Redis Cluster of one private node and its replica, and what kills
// the node, has the replica take over and returns a client of that one. The cluster's client asks only when it must which node serves which
// slot: not by itself, from time to time. All is gone when the test ends.
func Failover(t testing.TB) (client *redis.ClusterClient, failOver func() *redis.Client) {
	t.Helper()
	var servers [2]*testenv.Server
	var nodes [2]*redis.Client
	for i := range servers {
		servers[i] = testenv.Private(t, testenv.Redis, "--cluster-enabled", "yes", "--repl-diskless-sync-delay", "0")
		nodes[i] = Client(t, servers[i].URL())
	}
	primary, replica := nodes[0], nodes[1]
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("redistest: failover: %v", err)
		}
	}
	must(primary.ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	host, port, err := net.SplitHostPort(replica.Options().Addr)
	must(err)
	must(primary.ClusterMeet(t.Context(), host, port).Err())
	id, err := primary.Do(t.Context(), "CLUSTER", "MYID").Text()
	must(err)
	testenv.Eventually(t, func() error { return replica.ClusterReplicate(t.Context(), id).Err() })
	testenv.Eventually(t, func() error {
		info, err := replica.Info(t.Context(), "replication").Result()
		if err == nil && !strings.Contains(info, "master_link_status:up") {
			err = fmt.Errorf("the replica has no data yet: %s", info)
		}
		return err
	})
	testenv.Eventually(t, func() error { // the client learns of the replica from the node
		known, err := primary.ClusterSlots(t.Context()).Result()
		if err == nil && (len(known) != 1 || len(known[0].Nodes) != len(nodes)) {
			err = fmt.Errorf("the node does not know its replica yet: %v", known)
		}
		return err
	})
	client = redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{primary.Options().Addr}, ClusterStateReloadInterval: 24 * time.Hour, DialerRetries: 1,
	})
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Errorf("redistest: %v", err)
		}
	})
	testenv.Eventually(t, func() error { return client.Exists(t.Context(), "key").Err() })
	return client, func() *redis.Client {
		t.Helper()
		must(servers[0].Kill())
		must(replica.Do(t.Context(), "CLUSTER", "FAILOVER", "TAKEOVER").Err())
		return replica
	}
}
