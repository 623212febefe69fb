package faults_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// Everything happens to the Redis that holds the stream. It writes each entry to disk before it
// answers (appendfsync always), so that nothing may be missing from the stream in the end.
func TestOutboxRedisFaults(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	server := testenv.Private(t, testenv.Redis, "--appendonly", "yes", "--appendfsync", "always")
	s := newStore(t, pgtest.URL(t))
	client := redisClient(t, server.URL())
	job := relayJob{Patience: time.Second, MaxAttempts: 10}
	const relays = 2
	var ends []func()
	for range relays {
		ends = append(ends, job.startRedis(t, s, client))
	}
	l := ledger.New()
	stop := s.startLoad(l, rng, 120*time.Millisecond)

	replicaOf := func(host, port string) func() error { // on a client that retries nothing
		return func() error {
			testenv.Eventually(t, func() error { return client.ReplicaOf(t.Context(), host, port).Err() })
			return nil
		}
	}
	faults := []struct {
		name     string
		do, heal func() error
	}{
		{"killed", server.Kill, func() error { return server.Start(t.Context()) }},
		{"restarted", server.Stop, func() error { return server.Start(t.Context()) }},
		{"frozen", server.Pause, server.Resume},
		{"a replica", replicaOf("127.0.0.1", "1"), replicaOf("NO", "ONE")}, // no server listens there: the replica keeps its data
	}
	outages := 0
	for range scaled(t, 1) {
		rng.Shuffle(len(faults), func(i, k int) { faults[i], faults[k] = faults[k], faults[i] })
		for _, fault := range faults {
			untilLonger(t, client, 100)
			began := time.Now()
			must(t, fault.do())
			time.Sleep(time.Duration(500+rng.IntN(2000)) * time.Millisecond)
			must(t, fault.heal())
			untilLonger(t, client, 100)
			t.Logf("%-10s %5.1f s", fault.name, time.Since(began).Seconds())
			outages++
		}
	}
	stop()
	s.untilEmpty(patience)
	for _, end := range ends {
		end()
	}
	readStream(t, client, l)
	judge(t, l, s.deeds(), bounds{duplicates: outages * relays * inFlight, depth: batch})
	s.noDeadLetters()
}

// redisClient retries nothing, so that every repeat is the relay's.
func redisClient(t *testing.T, url string) *redis.Client {
	t.Helper()
	opts, err := redis.ParseURL(url)
	must(t, err)
	opts.MaxRetries, opts.ContextTimeoutEnabled = -1, true
	client := redis.NewClient(opts)
	t.Cleanup(func() { must(t, client.Close()) })
	return client
}

// startRedis runs the relay in this process with Redis Streams as its transport.
func (j relayJob) startRedis(t *testing.T, s *store, client redis.UniversalClient) (end func()) {
	t.Helper()
	publisher, err := outboxredis.NewPublisher(client, outboxredis.Config{Timeout: j.Patience})
	must(t, err)
	return beside(t, func(ctx context.Context) error {
		_, err := j.relay(ctx, s.pool, publisher, func() {})
		return err
	})
}

// untilLonger waits until the stream has n more entries.
func untilLonger(t *testing.T, client *redis.Client, n int64) {
	t.Helper()
	before := int64(-1)
	testenv.Eventually(t, func() error {
		length, err := client.XLen(t.Context(), "outbox").Result()
		if before < 0 && err == nil {
			before = length
		}
		if err == nil && length < before+n {
			err = fmt.Errorf("%d entries", length)
		}
		return err
	})
}

// readStream delivers all entries to the ledger.
func readStream(t *testing.T, client *redis.Client, l *ledger.Ledger) {
	t.Helper()
	const page = 10_000
	for from := "-"; ; {
		entries, err := client.XRangeN(t.Context(), "outbox", from, "+", page).Result()
		must(t, err)
		for _, entry := range entries {
			id, err := uuid.Parse(fmt.Sprint(entry.Values["id"]))
			must(t, err)
			l.Deliver(id, false)
		}
		if len(entries) < page {
			return
		}
		from = "(" + entries[len(entries)-1].ID
	}
}
