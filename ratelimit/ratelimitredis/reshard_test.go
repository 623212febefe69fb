package ratelimitredis_test

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// While the slot of the limits moves to another node, each decision is made or
// is ErrUnavailable, within the timeout; what was charged moves along.
func TestReshard(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	const timeout = time.Second
	l := open(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text(), Timeout: timeout, ProbeEvery: 20 * time.Millisecond, DenyCache: -1, Logger: slog.New(slog.DiscardHandler)})
	c := []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "user", Max: 300, Window: day}, Key: "ann"}, {Limit: ratelimit.Limit{Name: "global", Max: 1000, Window: day}}}
	var allowed, denied, failed atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				start := time.Now()
				d, err := l.Allow(ctx, c...)
				switch {
				case ctx.Err() != nil:
				case errors.Is(err, ratelimit.ErrUnavailable):
					if failed.Add(1) == 1 {
						t.Logf("the first failure: %v", err)
					}
				case err != nil:
					t.Error(err)
				case d.Allowed:
					allowed.Add(1)
				default:
					denied.Add(1)
				}
				if took := time.Since(start); took > timeout+500*time.Millisecond {
					t.Errorf("a call took %v", took)
				}
				if runloop.Sleep(ctx, time.Millisecond) != nil {
					return
				}
			}
		})
	}
	testenv.Eventually(t, patient, func() error {
		if allowed.Load() < 50 {
			return errors.New("too few yet")
		}
		return nil
	})
	moveSlot(t, client, servers, "{rl}")
	testenv.Eventually(t, patient, func() error {
		if denied.Load() == 0 {
			return errors.New("none denied yet")
		}
		return nil
	})
	stop()
	wg.Wait()
	t.Logf("%d allowed, %d denied, %d failed", allowed.Load(), denied.Load(), failed.Load())
	if n := allowed.Load(); n > 300 || n+failed.Load() < 300 {
		t.Errorf("%d were allowed and %d not decided, with a limit of 300", n, failed.Load())
	}
}

// moveSlot moves the slot of a key to another node of the cluster, as redis-cli
// --cluster reshard does.
func moveSlot(t *testing.T, client *redis.ClusterClient, servers []*testenv.Server, key string) {
	t.Helper()
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	slot, err := client.ClusterKeySlot(ctx, key).Result()
	must(err)
	from, err := client.MasterForKey(ctx, key)
	must(err)
	var to *redis.Client
	for _, s := range servers {
		if c := redistest.Client(t, s.URL()); c.Options().Addr != from.Options().Addr {
			to = c
		}
	}
	fromID, err := from.Do(ctx, "CLUSTER", "MYID").Text()
	must(err)
	toID, err := to.Do(ctx, "CLUSTER", "MYID").Text()
	must(err)
	must(to.Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", fromID).Err())
	must(from.Do(ctx, "CLUSTER", "SETSLOT", slot, "MIGRATING", toID).Err())
	must(runloop.Sleep(ctx, 50*time.Millisecond)) // some are asked meanwhile
	host, port, err := net.SplitHostPort(to.Options().Addr)
	must(err)
	for {
		keys, err := from.ClusterGetKeysInSlot(ctx, int(slot), 100).Result()
		must(err)
		if len(keys) == 0 {
			break
		}
		for _, k := range keys {
			must(from.Migrate(ctx, host, port, k, 0, 5*time.Second).Err())
		}
		must(runloop.Sleep(ctx, 20*time.Millisecond))
	}
	for _, node := range []*redis.Client{to, from} {
		must(node.Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", toID).Err())
	}
}
