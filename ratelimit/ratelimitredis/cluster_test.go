package ratelimitredis_test

import (
	"crypto/rand"
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest/conformance"
)

// A cluster of one node has no replicas, but it refuses a script over two slots
// as any cluster does.
func TestConformanceOnCluster(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis, "--cluster-enabled", "yes")
	node := redistest.Client(t, server.URL())
	if err := node.ClusterAddSlotsRange(t.Context(), 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patient, func() error {
		info, err := node.ClusterInfo(t.Context()).Result()
		if err == nil && !strings.Contains(info, "cluster_state:ok") {
			err = fmt.Errorf("cluster not ready: %s", info)
		}
		return err
	})
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{node.Options().Addr}})
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	conformance.Test(t, func(t *testing.T) conformance.Limiter {
		return open(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text()})
	}, func(t *testing.T, body func(t *testing.T)) { body(t) })
}
