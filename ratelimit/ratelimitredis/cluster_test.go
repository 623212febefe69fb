package ratelimitredis_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/ratelimit/conformance"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

func TestOnCluster(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "starts a cluster; TestClusterKeysShareOneSlot and TestCheck_findsProblemsOfDecisions cover the hash tag")
	client, _ := redistest.Cluster(t)
	t.Run("Conformance", func(t *testing.T) {
		conformance.Test(t, func(t *testing.T) conformance.Limiter {
			return open(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text()})
		}, func(t *testing.T, body func(t *testing.T)) { body(t) })
	})
	t.Run("Schedules", func(t *testing.T) { testSchedules(t, client) })
}

// A replica that has taken over decides, even if nobody redirects the client to it.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "starts a cluster and waits for its failover")
	client, failOver := redistest.Failover(t)
	l := open(t, client, ratelimitredis.Config{})
	allow := func() error {
		_, err := l.Allow(t.Context(), ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: day}, Key: "ann"})
		return err
	}
	if err := allow(); err != nil {
		t.Fatal(err)
	}
	failOver()
	testenv.Eventually(t, allow)
}

// A node that hangs affects only the limiters whose tag is on it. Other limiters do not wait for it, and its failures
// do not open their breakers.
func TestNodeThatHangsFailsItsOwnLimiters(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "pauses a node of a cluster, and asserts times")
	client, servers := redistest.Cluster(t)
	for _, s := range servers { // the others work without it
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
		t.Errorf("%d calls to the node that hangs, %d to others: too few to prove much", hung.Load(), others.Load())
	}
	if err := servers[0].Resume(); err != nil {
		t.Fatal(err)
	}
}

// While the slot of the limits moves to another node, each decision is made or is ErrUnavailable, within the timeout.
// The counters move with the slot.
func TestReshard(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "starts a cluster")
	client, servers := redistest.Cluster(t)
	const timeout = time.Second
	l := open(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text(), Timeout: timeout, DenyCache: -1, Logger: slog.New(slog.DiscardHandler)}).Probing(20 * time.Millisecond)
	c := []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "user", Max: 300, Window: day}, Key: "ann"}, {Limit: ratelimit.Limit{Name: "global", Max: 1000, Window: day}}}
	var allowed, denied, failed atomic.Int64
	leave := crowd(t, func(ctx context.Context) {
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
	})
	testenv.Eventually(t, func() error {
		if allowed.Load() < 50 {
			return errors.New("too few yet")
		}
		return nil
	})
	move := redistest.NewMove(t, client, servers, "{rl}")
	for _, step := range []func(context.Context) error{move.Begin, move.Keys, move.End} {
		if err := step(t.Context()); err != nil {
			t.Fatal(err)
		}
		_ = runloop.Sleep(t.Context(), 50*time.Millisecond) // some decisions are made in the meantime
	}
	testenv.Eventually(t, func() error {
		if denied.Load() == 0 {
			return errors.New("none denied yet")
		}
		return nil
	})
	leave()
	t.Logf("%d allowed, %d denied, %d failed", allowed.Load(), denied.Load(), failed.Load())
	if n := allowed.Load(); n > 300 || n+failed.Load() < 300 {
		t.Errorf("%d were allowed and %d not decided, with a limit of 300", n, failed.Load())
	}
}

// crowd calls ask from 8 goroutines, each a millisecond after its previous call, until leave is called.
func crowd(t *testing.T, ask func(ctx context.Context)) (leave func()) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				ask(ctx)
				_ = runloop.Sleep(ctx, time.Millisecond)
			}
		})
	}
	return func() {
		stop()
		wg.Wait()
	}
}
