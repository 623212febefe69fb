package ratelimitredis_test

import (
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest/conformance"
)

func TestOnCluster(t *testing.T) {
	t.Parallel()
	client, _ := redistest.Cluster(t)
	t.Run("Conformance", func(t *testing.T) {
		conformance.Test(t, func(t *testing.T) conformance.Limiter {
			return open(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text()})
		}, func(t *testing.T, body func(t *testing.T)) { body(t) })
	})
	t.Run("Schedules", func(t *testing.T) { testSchedules(t, client) })
	t.Run("Shards", func(t *testing.T) { testShards(t, client) })
}

// The shards' parts add up to the limit, whoever asks.
func testShards(t *testing.T, client *redis.ClusterClient) {
	l := open(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text(), Shards: 7})
	hourly := ratelimit.Limit{Name: "user", Max: 5, Window: day}
	total := ratelimit.Limit{Name: "global", Max: 100, Window: day}
	perUser := make([]atomic.Int64, 200)
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			for n := range len(perUser) * 4 {
				user := (n*7 + g) % len(perUser)
				d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: hourly, Key: fmt.Sprint("u", user)}, ratelimit.Charge{Limit: total})
				if err != nil {
					t.Error(err)
					return
				}
				if d.Allowed {
					perUser[user].Add(1)
				}
			}
		})
	}
	wg.Wait()
	sum := int64(0)
	for user := range perUser {
		if n := perUser[user].Load(); n > hourly.Max {
			t.Errorf("user %d got %d of %d", user, n, hourly.Max)
		}
		sum += perUser[user].Load()
	}
	if sum != total.Max {
		t.Errorf("%d were allowed, want the %d of all shards together", sum, total.Max)
	}

	d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: hourly, Key: "fresh"})
	if err != nil || !d.Allowed {
		t.Fatalf("%+v, %v", d, err)
	}
	if err := l.Refund(t.Context(), d.Charges()...); err != nil {
		t.Fatal(err)
	}
	if d, err := l.Peek(t.Context(), ratelimit.Charge{Limit: hourly, Key: "fresh"}); err != nil || d.Limits()[0].Remaining != 4 {
		t.Errorf("after a refund %+v, %v", d, err)
	}

	if used, err := redistest.NodesInUse(t.Context(), client); err != nil || used != 3 {
		t.Errorf("%d nodes hold counters, %v, want all 3", used, err)
	}
}

func TestShardsRefuseWhatTheyCannotDecide(t *testing.T) {
	t.Parallel()
	l := open(t, redistest.New(t), ratelimitredis.Config{Shards: 8})
	user := ratelimit.Charge{Limit: perUser, Key: "ann"}
	for name, charges := range map[string][]ratelimit.Charge{
		"two keys":       {user, {Limit: ratelimit.Limit{Name: "ip", Max: 10}, Key: "192.0.2.1"}, {Limit: global}},
		"no key":         {{Limit: global}},
		"a bucket":       {user, {Limit: tokens}},
		"too small":      {user, {Limit: ratelimit.Limit{Name: "all", Max: 7}}},
		"invalid anyway": {{Limit: ratelimit.Limit{Name: "user"}, Key: "ann"}},
	} {
		if err := l.Validate(charges...); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: Validate says %v", name, err)
		}
		if _, err := ratelimit.NewWaiter(l, charges, ratelimit.WaiterConfig{}); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: NewWaiter says %v", name, err)
		}
		if d, err := l.Allow(t.Context(), charges...); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: Allow says %+v, %v", name, d, err)
		}
	}
	if err := l.Validate(user, ratelimit.Charge{Limit: global}, ratelimit.Charge{Limit: ratelimit.Limit{Name: "daily", Max: 9, Window: day}, Key: "ann"}); err != nil {
		t.Error(err)
	}
}
