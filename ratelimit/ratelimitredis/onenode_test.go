package ratelimitredis_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// A node that hangs fails the shards on it, and no others: neither do they wait for
// it, nor does its breaker decide about them.
func TestNodeThatHangsFailsItsOwnShards(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	for _, s := range servers { // the others go on without it
		if err := redistest.Client(t, s.URL()).ConfigSet(t.Context(), "cluster-require-full-coverage", "no").Err(); err != nil {
			t.Fatal(err)
		}
	}
	l := open(t, client, ratelimitredis.Config{Shards: 12, Timeout: 2 * time.Second, DenyCache: -1})
	const users, each = 48, 6
	charge := func(n int) ratelimit.Charge {
		return ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: users * each, Window: day}, Key: fmt.Sprint("u", n)}
	}
	for n := range users {
		if d, err := l.Allow(t.Context(), charge(n)); err != nil || !d.Allowed {
			t.Fatalf("%+v, %v", d, err)
		}
	}
	keys, err := redistest.Client(t, servers[0].URL()).Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	there := strings.Join(keys, " ") + " "
	if err := servers[0].Pause(); err != nil {
		t.Fatal(err)
	}
	var hung, others atomic.Int64
	var crowd sync.WaitGroup
	for n := range users {
		onHung := strings.Contains(there, fmt.Sprintf(":u%d:", n))
		crowd.Go(func() {
			for range each {
				switch _, err := l.Allow(t.Context(), charge(n)); {
				case onHung && !errors.Is(err, ratelimit.ErrUnavailable):
					t.Errorf("user %d of the node that hangs: %v", n, err)
				case onHung:
					hung.Add(1)
				case err != nil:
					t.Errorf("user %d of another node: %v", n, err)
				default:
					others.Add(1)
				}
			}
		})
	}
	crowd.Wait()
	if hung.Load() == 0 || others.Load() == 0 {
		t.Errorf("%d calls to the node that hangs, %d to others: that proves little", hung.Load(), others.Load())
	}
	if err := servers[0].Resume(); err != nil {
		t.Fatal(err)
	}
}
