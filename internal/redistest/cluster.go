package redistest

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Cluster returns a client of a Redis Cluster of three private nodes without
// replicas, and the nodes. All is gone when the test ends.
func Cluster(t testing.TB) (*redis.ClusterClient, []*testenv.Server) {
	t.Helper()
	const nodes, slots = 3, 16384
	var servers []*testenv.Server
	var clients []*redis.Client
	var addrs []string
	for n := range nodes {
		s := testenv.Private(t, testenv.Redis, "--cluster-enabled", "yes", "--cluster-node-timeout", "10000") // what a busy machine does is no failure
		c := Client(t, s.URL())
		if err := c.ClusterAddSlotsRange(t.Context(), n*slots/nodes, (n+1)*slots/nodes-1).Err(); err != nil {
			t.Fatalf("redistest: cluster: %v", err)
		}
		servers, clients, addrs = append(servers, s), append(clients, c), append(addrs, c.Options().Addr)
	}
	for _, addr := range addrs[1:] {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			t.Fatal(err)
		}
		if err := clients[0].ClusterMeet(t.Context(), host, port).Err(); err != nil {
			t.Fatalf("redistest: cluster: %v", err)
		}
	}
	for _, c := range clients {
		testenv.Eventually(t, testenv.Patience, func() error {
			info, err := c.ClusterInfo(t.Context()).Result()
			if err == nil && (!strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d", nodes))) {
				err = fmt.Errorf("cluster not ready: %s", info)
			}
			return err
		})
	}
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Errorf("redistest: %v", err)
		}
	})
	return client, servers
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
