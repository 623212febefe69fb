package inboxredis_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// owners returns by which process each partition is served; "" by none.
func owners(t *testing.T, client redis.UniversalClient) (processes [partitions]string) {
	t.Helper()
	for i := range processes {
		token := client.Get(t.Context(), fmt.Sprintf("{%s}:%s:owner", partition.Name(stream, i), groupName)).Val()
		processes[i] = token[:max(strings.LastIndexByte(token, '-'), 0)] // after it is the number of the session
	}
	return processes
}

// awaitShares waits until the processes hold so many partitions each, in any order.
func awaitShares(t *testing.T, client redis.UniversalClient, want ...int) {
	t.Helper()
	testenv.Eventually(t, func() error {
		counts := map[string]int{}
		for i, process := range owners(t, client) {
			if process == "" {
				return fmt.Errorf("partition %d has no owner", i)
			}
			counts[process]++
		}
		var got []int
		for _, n := range counts {
			got = append(got, n)
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("the processes hold %v partitions, want %v", got, want)
		}
		return nil
	})
}

func effectless(*inbox.Message) error { return nil }

// A process that comes gets its share, and what one has held that ends goes to the others.
func TestPartitionsAreShared(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	endFirst := start(t, partitioned(t, client, effectless))
	awaitShares(t, client, 4)
	endSecond := start(t, partitioned(t, client, effectless))
	awaitShares(t, client, 2, 2)
	ends := []func(){endFirst, endSecond}
	for range 3 {
		ends = append(ends, start(t, partitioned(t, client, effectless)))
	}
	// Of five processes one has none: it waits.
	awaitShares(t, client, 1, 1, 1, 1)
	for _, end := range ends[:4] {
		end()
	}
	awaitShares(t, client, 4)
	ends[4]()
	if left := owners(t, client); left != [partitions]string{} {
		t.Errorf("after the end the partitions are held by %v", left)
	}
}

// What a process held that died goes to another one, which counts it until then.
func TestPartitionsOfADeadProcess(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	next := partitioned(t, client, effectless)
	first := "{" + partition.Name(stream, 0) + "}:" + groupName + ":"
	now := client.Time(t.Context()).Val()
	dead := redis.Z{Score: float64(now.UnixMilli()), Member: "dead"}
	if err := client.ZAdd(t.Context(), first+fmt.Sprint("processes.", partitions), dead).Err(); err != nil {
		t.Fatal(err)
	}
	for i := range partitions {
		key := fmt.Sprintf("{%s}:%s:owner", partition.Name(stream, i), groupName)
		if err := client.Set(t.Context(), key, "dead-1", 8*time.Second).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if held := owners(t, client); held != [partitions]string{"dead", "dead", "dead", "dead"} {
		t.Fatalf("the partitions are held by %v", held)
	}
	end := start(t, next)
	testenv.Eventually(t, func() error {
		held := owners(t, client)
		if slices.Contains(held[:], "dead") || slices.Contains(held[:], "") {
			return fmt.Errorf("the partitions are held by %v", held)
		}
		return nil
	})
	end()
}

// A partition in which a message waits for its retry stays where it is, and others are passed on.
func TestPartitionThatWaitsIsNotPassedOn(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	var failed atomic.Bool
	var mended atomic.Bool
	cfg := orderedBy(partitions)
	cfg.Group = groupName
	cfg.Retry = inbox.RetryPolicy{BaseDelay: time.Second, MaxDelay: time.Second, MaxAttempts: 10_000}
	first := newConsumer(t, client, processor(func(*inbox.Message) error {
		if mended.Load() {
			return nil
		}
		failed.Store(true)
		return errors.New("for now")
	}), cfg)
	for i := range 3 {
		publishTo(t, client, partitions, keyed(keyOf(t, i)))
	}
	endFirst := start(t, first)
	awaitShares(t, client, 4)
	testenv.Eventually(t, func() error {
		if !failed.Load() {
			return errors.New("no message was tried")
		}
		return nil
	})
	before := owners(t, client)
	endSecond := start(t, partitioned(t, client, effectless))
	awaitShares(t, client, 1, 3)
	after := owners(t, client)
	if after[3] == before[3] || !slices.Equal(after[:3], before[:3]) {
		t.Errorf("partition 3 has nothing that waits; before %v, after %v", before, after)
	}
	mended.Store(true)
	awaitShares(t, client, 2, 2)
	endFirst()
	endSecond()
}

// The limits are those of all partitions together.
func TestMessageLimitOfAllPartitions(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	var done atomic.Int64
	cfg := orderedBy(partitions)
	cfg.Group, cfg.MessageLimit = groupName, 10
	c := newConsumer(t, client, processor(func(*inbox.Message) error {
		done.Add(1)
		return nil
	}), cfg)
	var msgs []*inbox.Message
	for i := range 40 {
		msgs = append(msgs, keyed(keyOf(t, i%partitions)))
	}
	publishTo(t, client, partitions, msgs...)
	if err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := done.Load(); n != 10 {
		t.Errorf("%d messages, want 10", n)
	}
}

// The dead letters of all partitions are one list, and each goes back to its partition.
func TestDeadLettersOfPartitions(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	var mended atomic.Bool
	returned := make(chan *inbox.Message, partitions)
	c := partitioned(t, client, func(m *inbox.Message) error {
		if !mended.Load() {
			return inbox.Unrecoverable(errors.New("for now"))
		}
		returned <- m
		return nil
	})
	want := map[string]bool{}
	for i := range partitions {
		publishTo(t, client, partitions, keyed(keyOf(t, i)))
		want[partition.Name(stream, i)] = true
	}
	end := start(t, c)
	defer func() { end() }()
	letters := c.DeadLetters()
	testenv.Eventually(t, func() error {
		if n, err := letters.Count(t.Context(), inbox.Filter{}); n != partitions {
			return fmt.Errorf("%d dead letters, %w", n, err)
		}
		return nil
	})
	listed, err := letters.List(t.Context(), inbox.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, dead := range listed {
		if !want[dead.Message.Queue] {
			t.Errorf("a dead letter of %s", dead.Message.Queue)
		}
		delete(want, dead.Message.Queue)
	}
	mended.Store(true)
	back, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "operator", Reason: "mended"})
	if err != nil || back.Returned != partitions {
		t.Fatalf("%+v, %v", back, err)
	}
	for range partitions {
		select {
		case m := <-returned:
			if queue := partition.Name(stream, partition.Of(m.Key, "", partitions)); m.Queue != queue || m.Replays != 1 {
				t.Errorf("key %s came back from %s after %d replays, want %s", m.Key, m.Queue, m.Replays, queue)
			}
		case <-time.After(testenv.Patience):
			t.Fatal("a replayed message does not come back")
		}
	}
	if n, err := letters.Count(t.Context(), inbox.Filter{}); n != 0 || err != nil {
		t.Errorf("%d dead letters are left, %v", n, err)
	}
}

// The partitions are in slots of their own, on several nodes, and one consumer reads all of them.
func testPartitionsOnCluster(t *testing.T, client *redis.ClusterClient) {
	nodes := map[string]bool{}
	for _, name := range partition.Names(stream, partitions) {
		node, err := client.MasterForKey(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		nodes[node.Options().Addr] = true
	}
	if len(nodes) < 2 {
		t.Errorf("all partitions are on %v", nodes)
	}
	var done atomic.Int64
	defer start(t, partitioned(t, client, func(m *inbox.Message) error {
		if m.Attempt == 1 {
			return errors.New("at first")
		}
		done.Add(1)
		return nil
	}))()
	const n = 100
	for i := range n {
		publishTo(t, client, partitions, keyed(fmt.Sprintf("key-%d", i%20)))
	}
	testenv.Eventually(t, func() error {
		if got := done.Load(); got < n {
			return fmt.Errorf("%d of %d messages", got, n)
		}
		return nil
	})
}
