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

// A node that hangs fails the limiters whose tag is on it, and no others: neither do they wait for it,
// nor does its breaker decide about them.
func TestNodeThatHangsFailsItsOwnLimiters(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	for _, s := range servers { // the others go on without it
		if err := redistest.Client(t, s.URL()).ConfigSet(t.Context(), "cluster-require-full-coverage", "no").Err(); err != nil {
			t.Fatal(err)
		}
	}
	const each = 6
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: day}, Key: "ann"}
	limiters := map[string]*ratelimitredis.Limiter{}
	for n := range 12 {
		tag := fmt.Sprint("t", n)
		limiters[tag] = open(t, client, ratelimitredis.Config{Tag: tag, DenyCache: -1})
		if d, err := limiters[tag].Allow(t.Context(), c); err != nil || !d.Allowed {
			t.Fatalf("%+v, %v", d, err)
		}
	}
	if used, err := redistest.NodesInUse(t.Context(), client); err != nil || used != 3 {
		t.Errorf("%d nodes hold counters, %v, want all 3", used, err)
	}
	keys, err := redistest.Client(t, servers[0].URL()).Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	there := strings.Join(keys, " ")
	onHung := func(tag string) bool { return strings.Contains(there, "{"+tag+"}") }
	for tag := range limiters {
		if onHung(tag) {
			limiters[tag] = open(t, client, ratelimitredis.Config{Tag: tag, Timeout: 2 * time.Second, DenyCache: -1})
		}
	}
	if err := servers[0].Pause(); err != nil {
		t.Fatal(err)
	}
	var hung, others atomic.Int64
	var crowd sync.WaitGroup
	for tag, l := range limiters {
		crowd.Go(func() {
			soonest := time.Minute
			for range each {
				began := time.Now()
				_, err := l.Allow(t.Context(), c)
				soonest = min(soonest, time.Since(began))
				switch {
				case onHung(tag) && !errors.Is(err, ratelimit.ErrUnavailable):
					t.Errorf("%s, of the node that hangs: %v", tag, err)
				case onHung(tag):
					hung.Add(1)
				case err != nil:
					t.Errorf("%s, of another node: %v", tag, err)
				default:
					others.Add(1)
				}
			}
			if !onHung(tag) && soonest > time.Second {
				t.Errorf("%s, of another node: no call took less than %v", tag, soonest)
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
