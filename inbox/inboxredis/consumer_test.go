package inboxredis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

func TestConsumer(t *testing.T) {
	t.Parallel()
	redistest.URL(t) // skips before there are subtests
	for name, cfg := range map[string]inboxredis.Config{"shared": {}, "ordered": orderedBy(1), "partitioned": orderedBy(4)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runs := runsOf(name)
			runs.Variant = cfg.Partitions > 1
			conformance.TestConsumer(t, conformance.ConsumerBackend{
				Runs: runs, Ordered: cfg.Ordered,
				New: func(t *testing.T) conformance.ConsumerFixture { return newConsumerFixture(t, cfg) },
			})
		})
	}
}

func TestPartitions(t *testing.T) {
	t.Parallel()
	redistest.URL(t) // skips before there are subtests
	conformance.TestPartitions(t, conformance.PartitionsBackend{
		Runs: runsOf("partitions"),
		New: func(t *testing.T) conformance.ConsumerFixture {
			return newConsumerFixture(t, orderedBy(conformance.Partitions))
		},
		Of: func(m *inbox.Message) int { return partition.Of(m.Key, m.ID.String(), conformance.Partitions) },
	})
}

// orderedBy returns the config of an ordered consumer with this number of partitions.
func orderedBy(partitions int) inboxredis.Config {
	return inboxredis.Config{Partitions: partitions, ConsumerConfig: inbox.ConsumerConfig{Ordered: true}}
}

func newConsumerFixture(t *testing.T, own inboxredis.Config) conformance.ConsumerFixture {
	t.Helper()
	f := newPartitions(t, own.Ordered, own.Partitions)
	return conformance.ConsumerFixture{
		SourceFixture: f.source(),
		Parts: func(t *testing.T) []driver.Source {
			all, _ := f.parts(t, f.through, groupName)
			return all
		},
		Consumer: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) conformance.Consumer {
			cfg.Name, cfg.Ordered = groupName, own.Ordered
			if len(cfg.Classes) == 0 {
				cfg.Classes = []string{conformance.OwnClass}
			}
			c, err := inboxredis.NewTuned(f.through, stream, p, inboxredis.Config{Partitions: own.Partitions, ConsumerConfig: cfg.ConsumerConfig}, cfg.MaxBodyBytes, 300*time.Millisecond)
			noError(t, err)
			return c
		},
	}
}

// newConsumer returns a consumer of the stream after its Setup.
func newConsumer(t *testing.T, client redis.UniversalClient, p inbox.Processor, cfg inboxredis.Config) *inboxredis.Consumer {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	from, consumer := cfg.Of(stream)
	c, err := inboxredis.NewConsumer(client, from, p, consumer)
	noError(t, err)
	noError(t, c.Setup(t.Context()))
	return c
}

// start runs a consumer until stop is called; stop waits for its end.
func start(t *testing.T, c *inboxredis.Consumer) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	return func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func TestConsumerCheck(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis)
	client := redistest.Client(t, server.URL())
	c, err := inboxredis.NewConsumer(client, inboxredis.Stream{Name: stream}, inbox.NewMux(), inbox.ConsumerConfig{})
	noError(t, err)
	want := func(texts ...string) {
		t.Helper()
		err := c.Check(t.Context())
		if joined, ok := err.(interface{ Unwrap() []error }); (err != nil) != (len(texts) > 0) || ok && len(joined.Unwrap()) != len(texts) {
			t.Errorf("%d findings wanted: %v", len(texts), err)
			return
		}
		for _, text := range texts {
			if _, fixes := errors.AsType[interface {
				error
				Fix() string
			}](err); !fixes || !strings.Contains(err.Error(), text) {
				t.Errorf("Check: %v, want a finding with %q", err, text)
			}
		}
	}
	want(`stream "orders" has no group "orders"; call Consumer.Setup`, `stream "{orders}:orders:retries" has no group`)
	for range 2 {
		noError(t, c.Setup(t.Context()))
	}
	want()
	// A group whose consumers read, or did recently, may have unread messages without a finding.
	setup(t, client, "read")
	publish(t, client, event())
	noError(t, client.XReadGroup(t.Context(), &redis.XReadGroupArgs{Group: "read", Consumer: "c", Streams: []string{stream, ">"}}).Err())
	want()
	setup(t, client, "deserted")
	want(`nobody reads the group "deserted", which is 1 messages behind`)
	noError(t, client.XGroupDestroy(t.Context(), stream, "deserted").Err())
	noError(t, errors.Join(client.ConfigSet(t.Context(), "maxmemory", "100mb").Err(), client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru").Err()))
	want("maxmemory-policy is allkeys-lru: Redis may evict whole streams")
	marks := newProcessor(t, client, inboxredis.ProcessorConfig{}, succeed)
	if err := marks.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "may evict the marks") {
		t.Errorf("Check of a Processor: %v", err)
	}
	noError(t, client.ConfigSet(t.Context(), "maxmemory-policy", "noeviction").Err(), marks.Check(t.Context()))
	host, port, _ := strings.Cut(client.Options().Addr, ":")
	testenv.Private(t, testenv.Redis, "--replicaof", host, port)
	testenv.Eventually(t, func() error {
		if err := c.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "a failover loses them; CONFIG SET min-replicas-to-write 1") {
			return errors.Join(errors.New("no finding"), err)
		}
		return nil
	})
	noError(t, client.ConfigSet(t.Context(), "min-replicas-to-write", "1").Err())
	want()
	ordered, err := inboxredis.NewConsumer(client, inboxredis.Stream{Name: stream}, inbox.NewMux(), inbox.ConsumerConfig{Ordered: true})
	noError(t, err)
	if err := ordered.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "use a processor with a ledger") {
		t.Errorf("an ordered consumer without a ledger: %v", err)
	}
}

func TestConsumerConfig(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	_, err := inboxredis.NewConsumer(nil, inboxredis.Stream{Name: "a}b", Timeout: -time.Second}, nil, inbox.ConsumerConfig{Batch: -1})
	for _, want := range []string{"client is nil", "no hash tag", "processor is nil", ": Timeout -", "ConsumerConfig.Batch"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if _, err := inboxredis.NewConsumer(client, inboxredis.Stream{Name: "orders"}, inbox.NewMux(), inbox.ConsumerConfig{}); err != nil {
		t.Error(err)
	}
}

const partitions = 4

// processor is an inbox.Processor made from a function.
type processor func(*inbox.Message) error

// Process implements inbox.Processor.
func (p processor) Process(_ context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = p(m)
	}
	return results
}

// partitioned returns a consumer of all partitions, like another process, after its Setup.
func partitioned(t *testing.T, client redis.UniversalClient, p processor) *inboxredis.Consumer {
	t.Helper()
	cfg := orderedBy(partitions)
	cfg.Group, cfg.Concurrency = groupName, 2
	cfg.Retry = inbox.RetryPolicy{MaxAttempts: 50, BaseDelay: 10 * time.Millisecond, MaxDelay: 30 * time.Millisecond}
	return newConsumer(t, client, p, cfg)
}

func keyed(key string) *inbox.Message {
	return &inbox.Message{ID: ids.New(), Name: "order.placed", Key: key, Body: []byte("{}"), PublishedAt: time.Now()}
}

// keyOf returns a key of a partition.
func keyOf(t *testing.T, n int) string {
	t.Helper()
	for i := range 1000 {
		if key := fmt.Sprintf("key-%d", i); partition.Of(key, "", partitions) == n {
			return key
		}
	}
	t.Fatalf("no key of partition %d", n)
	return ""
}

func TestPartitionsRefused(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{})
	defer client.Close()
	for name, tt := range map[string]struct {
		stream string
		cfg    inboxredis.Config
		want   string // none: it is not refused
	}{
		"not ordered": {stream, inboxredis.Config{Partitions: 2}, "needs ConsumerConfig.Ordered"},
		"own keys":    {stream, inboxredis.Config{Partitions: 2, ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Key: func(*inbox.Message) string { return "" }}}, "excludes ConsumerConfig.Key"},
		"parked keys": {stream, inboxredis.Config{Partitions: 2, ConsumerConfig: inbox.ConsumerConfig{Ordered: true, ParkKeys: true}}, "excludes ConsumerConfig.ParkKeys"},
		"too many":    {stream, orderedBy(65), "65 is not from 0 to 64"},
		"negative":    {stream, orderedBy(-1), "-1 is not from 0 to 64"},
		"name":        {strings.Repeat("s", 511), orderedBy(2), "longer than 512 bytes"},
		"one":         {stream, inboxredis.Config{Partitions: 1}, ""},
		"most":        {stream, orderedBy(64), ""},
	} {
		from, consumer := tt.cfg.Of(tt.stream)
		_, err := inboxredis.NewConsumer(client, from, inbox.NewMux(), consumer)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// Setup creates all partitions. Check checks all of them, and reports a partition too many.
func TestPartitionsSetupAndCheck(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	cfg := orderedBy(partitions)
	cfg.Logger = slog.New(slog.DiscardHandler)
	from, consumer := cfg.Of(stream)
	c, err := inboxredis.NewConsumer(client, from, inbox.NewMux(), consumer)
	noError(t, err)
	missing := func() (streams []string) {
		err := c.Check(t.Context())
		for i := range partitions + 1 {
			if name := partition.Name(stream, i); err != nil && strings.Contains(err.Error(), fmt.Sprintf("%q", name)) {
				streams = append(streams, name)
			}
		}
		return streams
	}
	if got := missing(); len(got) != partitions {
		t.Errorf("before Setup Check names %v", got)
	}
	for range 2 {
		noError(t, c.Setup(t.Context()))
	}
	if got := missing(); len(got) != 0 {
		t.Errorf("after Setup Check names %v", got)
	}
	keys := client.Keys(t.Context(), stream+"*").Val()
	if slices.Sort(keys); !slices.Equal(keys, partition.Names(stream, partitions)) {
		t.Errorf("Setup made %v", keys)
	}
	options := *client.Options()
	options.PoolSize = partitions
	narrow := redis.NewClient(&options)
	defer narrow.Close()
	if err := partitioned(t, narrow, nil).Check(t.Context()); err == nil || !strings.Contains(err.Error(), "the client has 4 connections") {
		t.Errorf("with a small pool Check finds %v", err)
	}
	publishTo(t, client, partitions+1, keyed(extraKey(t)))
	if got := missing(); !slices.Equal(got, []string{partition.Name(stream, partitions)}) {
		t.Errorf("with one partition too many Check names %v", got)
	}
}

// extraKey is a key of the partition that a larger number would add.
func extraKey(t *testing.T) string {
	t.Helper()
	for i := range 1000 {
		if key := fmt.Sprintf("key-%d", i); partition.Of(key, "", partitions+1) == partitions {
			return key
		}
	}
	t.Fatal("no such key")
	return ""
}

// owners returns the process that serves each partition, or "".
func owners(t *testing.T, client redis.UniversalClient) (processes [partitions]string) {
	t.Helper()
	for i := range processes {
		token := client.Get(t.Context(), fmt.Sprintf("{%s}:%s:owner", partition.Name(stream, i), groupName)).Val()
		processes[i] = token[:max(strings.LastIndexByte(token, '-'), 0)] // the number of the session follows
	}
	return processes
}

func effectless(*inbox.Message) error { return nil }

// The partitions of a crashed process go to another process, which counts the crashed one until then.
func TestPartitions_moveFromCrashedProcess(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	next := partitioned(t, client, effectless)
	first := "{" + partition.Name(stream, 0) + "}:" + groupName + ":"
	now := client.Time(t.Context()).Val()
	dead := redis.Z{Score: float64(now.Add(-7 * time.Second).UnixMilli()), Member: "dead"} // it counts for 8 s
	noError(t, client.ZAdd(t.Context(), first+fmt.Sprint("processes.", partitions), dead).Err())
	for i := range partitions {
		key := fmt.Sprintf("{%s}:%s:owner", partition.Name(stream, i), groupName)
		noError(t, client.Set(t.Context(), key, "dead-1", 500*time.Millisecond).Err())
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

// The partitions are in different slots, on several nodes, and one consumer reads all of them.
func testPartitionsOnCluster(t *testing.T, client *redis.ClusterClient) {
	nodes := map[string]bool{}
	for _, name := range partition.Names(stream, partitions) {
		node, err := client.MasterForKey(t.Context(), name)
		noError(t, err)
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
