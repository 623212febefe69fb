package inboxredis_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// What a dead process held is found among many that are in work, in a few commands.
func TestClaimAmongMany(t *testing.T) {
	t.Parallel()
	client := redistest.Client(t, testenv.Private(t, testenv.Redis).URL())
	setup(t, client, groupName)
	const n = 20_000
	fill(t, client, stream, n)
	client.XGroupSetID(t.Context(), stream, groupName, "0")
	read, err := client.XReadGroup(t.Context(), &redis.XReadGroupArgs{Group: groupName, Consumer: "c", Streams: []string{stream, ">"}}).Result()
	noError(t, err)
	noError(t, client.Do(t.Context(), "XCLAIM", stream, groupName, "c", 0, read[0].Messages[n/2].ID, "IDLE", time.Hour.Milliseconds()).Err())
	receive(t, open(t, newSource(t, client, inboxredis.Config{}), 2), 1)
	stats, err := client.InfoMap(t.Context(), "commandstats").Result()
	noError(t, err)
	calls, _, _ := strings.Cut(strings.TrimPrefix(stats["Commandstats"]["cmdstat_xautoclaim"], "calls="), ",")
	if n, err := strconv.Atoi(calls); err != nil || n < 1 || n > 20 {
		t.Errorf("XAUTOCLAIM was called %q times", calls)
	}
}

// Who lost the lease because it was stopped gets nothing more, and its retries are refused; the next
// owner has all that was pending, in order, before what is new.
func TestLease(t *testing.T) {
	t.Parallel()
	f := newFixture(t, true)
	var want []*inbox.Message
	for range 8 {
		want = append(want, event())
	}
	publish(t, f.direct, want[:6]...)
	stopped, _ := f.open(t, f.direct, groupName)
	before := open(t, stopped, 3)
	ds := receive(t, before, 3)                                                                 // its lease is not prolonged
	if err := f.direct.Del(t.Context(), "{"+stream+"}:"+groupName+":owner").Err(); err != nil { // as if it had run out
		t.Fatal(err)
	}
	next, _ := f.open(t, f.direct, groupName)
	s := open(t, running(t, next), 10)
	publish(t, f.direct, want[6:]...)
	got := receive(t, s, 8)
	for i, d := range got {
		if d.Message().ID != want[i].ID || d.Message().Redelivered != (i < 3) {
			t.Errorf("message %d: %+v", i+1, d.Message())
		}
	}
	running(t, stopped)
	for _, target := range []driver.Target{driver.ToLater, driver.ToTail, driver.ToDead} {
		letter := driver.NewDeadLetter(ds[0].Message(), driver.Failure{Class: driver.ClassDefault}, "test", time.Now())
		if err := stopped.Move(t.Context(), []driver.Move{{Delivery: ds[0], Target: target, Letter: letter}})[0]; !errors.Is(err, driver.ErrStale) {
			t.Errorf("a move of who has lost the lease: %v", err)
		}
	}
	if ds, err := before.Receive(t.Context(), 1); err == nil {
		t.Errorf("who has lost the lease gets %d messages", len(ds))
	}
	noError(t, before.Close(t.Context()))
	noError(t, s.Ack(t.Context(), got, false))
	publish(t, f.direct, event())
	receive(t, s, 1) // the lease is still the next one's
}

// What a living process holds is not claimed although all its idle connections have fallen silent.
func TestHalfOpenRenewal(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it waits longer than claims take, and a machine that stalls is late to renew")
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprint("ordered ", ordered), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, ordered)
			publish(t, f.direct, event())
			var idle sync.WaitGroup
			for range 6 {
				idle.Go(func() { _ = f.through.BLPop(t.Context(), time.Second, "nothing").Err() })
			}
			idle.Wait()
			cfg := inboxredis.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: ordered}}
			receive(t, open(t, running(t, newSource(t, f.through, cfg)), 1), 1)
			other := open(t, running(t, newSource(t, f.direct, cfg)), 1)
			f.network.SilenceConnections()
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			if ds, err := other.Receive(ctx, 1); len(ds) > 0 || ctx.Err() == nil {
				t.Errorf("%d messages of a living process, %v", len(ds), err)
			}
		})
	}
}

// All keys of a group are in one slot, whatever its names, and what has none is refused.
func TestCluster(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	for _, name := range []string{"orders", "{shop}orders", "orders{shop}.1", "o:{a}{b}", "x{}"} {
		keys, err := inboxredis.Keys(name, "billing")
		if (err != nil) != (name == "x{}") {
			t.Errorf("%q: %v", name, err)
		}
		if err != nil {
			continue
		}
		var slots []int64
		for _, k := range keys {
			slots = append(slots, client.ClusterKeySlot(t.Context(), k).Val())
		}
		if slices.Sort(slots); len(slices.Compact(slots)) != 1 {
			t.Errorf("%q: keys in slots %v", name, slots)
		}
	}
	for _, name := range []string{"", "a{b", "a}b", "{a", "{}a{b}"} {
		if _, err := inboxredis.Keys(name, "billing"); err == nil {
			t.Errorf("stream %q is allowed", name)
		}
	}
	t.Run("partitions", func(t *testing.T) { testPartitionsOnCluster(t, client) })
	t.Run("consume", func(t *testing.T) { testOnCluster(t, client, servers) })
}

// Messages are handled, retried and given up while their slot moves to another node.
func testOnCluster(t *testing.T, client *redis.ClusterClient, servers []*testenv.Server) {
	for name, ordered := range map[string]bool{"shared": false, "ordered": true} {
		t.Run(name, func(t *testing.T) {
			if ordered {
				testenv.Nightly(t, "the shared stream moves with every change")
			}
			var mu sync.Mutex
			seen := map[string]int{}
			mux := inbox.NewMux()
			handle(t, mux, event().Name, func(ctx context.Context) error {
				m, _ := inbox.FromContext(ctx)
				mu.Lock()
				defer mu.Unlock()
				if seen[m.ID.String()]++; len(seen)%5 == 0 && m.Replays == 0 {
					return errors.New("broken")
				}
				return nil
			})
			c := newConsumer(t, client, mux, inboxredis.Config{Group: name, ConsumerConfig: inbox.ConsumerConfig{
				Ordered: ordered, Retry: inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 20 * time.Millisecond},
			}})
			stop := start(t, c)
			defer stop()
			send := func(n int) {
				for range n {
					publish(t, client, event())
				}
			}
			left := func(want int) {
				t.Helper()
				testenv.Eventually(t, func() error {
					pending, err := client.XPending(t.Context(), stream, name).Result()
					if err != nil {
						return err
					}
					mu.Lock()
					defer mu.Unlock()
					if len(seen) < want || pending.Count > 0 {
						return fmt.Errorf("%d of %d messages, %d pending", len(seen), want, pending.Count)
					}
					return nil
				})
			}
			left(0)
			n := int(client.XLen(t.Context(), stream).Val()) // a new group gets what the other one has left
			send(50)
			left(n + 50)
			move := redistest.NewMove(t, client, servers, stream)
			for _, step := range []func(context.Context) error{move.Begin, move.Keys, move.End} {
				noError(t, step(t.Context()))
				send(10)
			}
			send(50)
			left(n + 130)
			testenv.Eventually(t, func() error { // retries may still be on their way
				if _, err := c.DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); err != nil {
					return err
				}
				dead, err := c.DeadLetters().Count(t.Context(), inbox.Filter{})
				if err == nil && dead > 0 {
					err = fmt.Errorf("%d dead letters", dead)
				}
				return err
			})
		})
	}
}

// A replica that has taken over takes claims, and a consumer goes on there, though nobody refers the client to it.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "a replica takes over after seconds")
	client, failOver := redistest.Failover(t)
	p := newProcessor(t, client, inboxredis.ProcessorConfig{Namespace: "failover"}, succeed)
	noError(t, process(t, p, event()))
	handled := make(chan struct{}, 100)
	mux := inbox.NewMux()
	handle(t, mux, event().Name, func(context.Context) error {
		handled <- struct{}{}
		return nil
	})
	defer start(t, newConsumer(t, client, mux, inboxredis.Config{}))()
	publish(t, client, event())
	awaitHandled(t, handled)
	publish(t, failOver(), event())
	awaitHandled(t, handled)
	testenv.Eventually(t, func() error { return process(t, p, event()) })
}
