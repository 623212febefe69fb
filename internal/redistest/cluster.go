package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	slots           = 16384
	clusterPatience = time.Minute
)

// Cluster returns a client of a private Redis Cluster of three nodes without
// replicas. Its keys lie on all of them.
func Cluster(t testing.TB) *redis.ClusterClient {
	t.Helper()
	const size = 3
	var nodes []*redis.Client
	var addrs []string
	for range size {
		server := testenv.Private(t, testenv.Redis, "--cluster-enabled", "yes")
		node := Client(t, server.URL())
		nodes, addrs = append(nodes, node), append(addrs, node.Options().Addr)
	}
	for i, node := range nodes {
		err := node.ClusterAddSlotsRange(t.Context(), i*slots/size, (i+1)*slots/size-1).Err()
		host, port, splitErr := net.SplitHostPort(addrs[0])
		if err == nil && i > 0 {
			err = node.ClusterMeet(t.Context(), host, port).Err()
		}
		if err := errors.Join(err, splitErr); err != nil {
			t.Fatalf("redistest: cluster: %v", err)
		}
	}
	for _, node := range nodes {
		testenv.Eventually(t, clusterPatience, func() error { return clusterReady(t.Context(), node, size) })
	}
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Errorf("redistest: %v", err)
		}
	})
	return client
}

func clusterReady(ctx context.Context, node *redis.Client, size int) error {
	info, err := node.ClusterInfo(ctx).Result()
	if err != nil {
		return err
	}
	for _, want := range []string{"cluster_state:ok", fmt.Sprintf("cluster_known_nodes:%d", size), fmt.Sprintf("cluster_size:%d", size)} {
		if !strings.Contains(info, want) {
			return fmt.Errorf("cluster is not ready: no %s in %q", want, info)
		}
	}
	return nil
}
