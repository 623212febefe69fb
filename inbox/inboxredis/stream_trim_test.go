package inboxredis_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Whatever three groups have read and acknowledged, trimming takes nothing that one of them has not
// done with, and in the end all that is done.
func TestTrim(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis, "--stream-node-max-entries", "1")
	client := redistest.Client(t, server.URL())
	groups := []string{groupName, "mailing", "audit"}
	open := map[string]map[string]bool{} // of each group: what it has not acknowledged
	for _, g := range groups {
		setup(t, client, g)
		open[g] = map[string]bool{}
	}
	source, _, err := inboxredis.NewSource(client, stream, inboxredis.Config{Group: groupName})
	noError(t, err)
	pending := map[string][]string{}
	all := 0
	check := func() {
		t.Helper()
		noError(t, inboxredis.Trim(t.Context(), source))
		there := map[string]bool{}
		for _, m := range client.XRange(t.Context(), stream, "-", "+").Val() {
			there[m.ID] = true
		}
		for g, ids := range open {
			for id := range ids {
				if !there[id] {
					t.Fatalf("entry %s was removed, which group %q is not done with", id, g)
				}
			}
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 400 {
		switch g := groups[rng.IntN(len(groups))]; rng.IntN(4) {
		case 0:
			for range rng.IntN(5) {
				// Ids whose counts differ in length, and are larger than a float can tell apart.
				id := client.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, ID: fmt.Sprintf("%d-%d", 5+all/7, uint64(1)<<(54+all%7)), Values: []string{"n", "1"}}).Val()
				all++
				for _, g := range groups {
					open[g][id] = true
				}
			}
		case 1:
			read, _ := client.XReadGroup(t.Context(), &redis.XReadGroupArgs{
				Group: g, Consumer: "c", Streams: []string{stream, ">"}, Count: int64(1 + rng.IntN(4)), Block: -1,
			}).Result()
			for _, s := range read {
				for _, m := range s.Messages {
					pending[g] = append(pending[g], m.ID)
				}
			}
		case 2:
			if n := len(pending[g]); n > 0 {
				i := rng.IntN(n)
				id := pending[g][i]
				pending[g] = slices.Delete(pending[g], i, i+1)
				client.XAck(t.Context(), stream, g, id)
				delete(open[g], id)
			}
		default:
			check()
		}
	}
	for _, g := range groups {
		_, _ = client.XReadGroup(t.Context(), &redis.XReadGroupArgs{Group: g, Consumer: "c", Streams: []string{stream, ">"}, Block: -1}).Result()
		for id := range open[g] {
			client.XAck(t.Context(), stream, g, id)
		}
		clear(open[g])
	}
	for range 1 + all/100 { // Redis bounds what one call removes
		check()
	}
	if n := client.XLen(t.Context(), stream).Val(); n > 2 || all < 100 {
		t.Errorf("%d of %d entries are left that all are done with", n, all)
	}
}

// One look at the stream removes all that is processed, however much it is.
func TestTrimKeepsUp(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	const n = 15_000
	fill(t, f.direct, stream, n)
	noError(t, inboxredis.Trim(t.Context(), newSource(t, f.direct, inboxredis.Config{})))
	if left := f.direct.XLen(t.Context(), stream).Val(); left > n/10 {
		t.Errorf("%d of %d entries are left", left, n)
	}
}

// The stream is kept for others where the Config says so; the retries belong to one group.
func TestKeepProcessed(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	const n = 1000
	retries := "{" + stream + "}:" + groupName + ":retries"
	fill(t, f.direct, stream, n)
	fill(t, f.direct, retries, n)
	noError(t, inboxredis.Trim(t.Context(), newSource(t, f.direct, inboxredis.Config{KeepProcessed: true})))
	if left := f.direct.XLen(t.Context(), retries).Val(); left > n/2 {
		t.Errorf("%d of %d retries are left", left, n)
	}
	if left := f.direct.XLen(t.Context(), stream).Val(); left != n {
		t.Errorf("%d of %d entries are left", left, n)
	}
}

// fill adds entries that the group has processed.
func fill(t *testing.T, client redis.UniversalClient, key string, n int) {
	t.Helper()
	pipe := client.Pipeline()
	for range n {
		pipe.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: []string{"n", "1"}})
	}
	pipe.XGroupSetID(t.Context(), key, groupName, "$")
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Names that hold nothing go; one that holds entries stays, and so do they.
func TestForget(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	source, _ := f.open(t, f.direct, groupName)
	publish(t, f.direct, event())
	s := open(t, source, 1)
	ds := receive(t, s, 1)
	noError(t, f.direct.XGroupCreateConsumer(t.Context(), stream, groupName, "gone").Err())
	names := func() (n int) {
		for _, c := range f.direct.XInfoConsumers(t.Context(), stream, groupName).Val() {
			if c.Name == "gone" || c.Pending > 0 {
				n++
			}
		}
		return n
	}
	for idle, want := range map[time.Duration]int{time.Hour: 2} {
		if err := inboxredis.Forget(t.Context(), source, idle); err != nil || names() != want {
			t.Errorf("%d names after %v, want %d: %v", names(), idle, want, err)
		}
	}
	time.Sleep(10 * time.Millisecond)
	if err := inboxredis.Forget(t.Context(), source, 0); err != nil || names() != 1 {
		t.Errorf("%d names, want 1: %v", names(), err)
	}
	noError(t, s.Ack(t.Context(), ds, false))
	if err := s.Close(t.Context()); err != nil || len(f.direct.XInfoConsumers(t.Context(), stream, groupName).Val()) != 0 {
		t.Errorf("a session leaves its name: %v", err)
	}
}
