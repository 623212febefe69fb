package inboxredis_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
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
		Of: func(m *inbox.Message) string {
			return partition.Name(stream, partition.Of(m.Key, m.ID.String(), conformance.Partitions))
		},
	})
}

// orderedBy has messages ordered, in so many partitions.
func orderedBy(partitions int) inboxredis.Config {
	return inboxredis.Config{Partitions: partitions, ConsumerConfig: inbox.ConsumerConfig{Ordered: true}}
}

func newConsumerFixture(t *testing.T, own inboxredis.Config) conformance.ConsumerFixture {
	t.Helper()
	f := newPartitions(t, own.Ordered, own.Partitions)
	return conformance.ConsumerFixture{
		SourceFixture: f.source(),
		Consumer: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) conformance.Consumer {
			cfg.Name, cfg.Ordered = groupName, own.Ordered
			if len(cfg.Classes) == 0 {
				cfg.Classes = []string{conformance.OwnClass}
			}
			c, err := inboxredis.NewLimitedConsumer(f.through, stream, p, inboxredis.Config{Partitions: own.Partitions, ConsumerConfig: cfg.ConsumerConfig}, cfg.MaxBodyBytes)
			noError(t, err)
			return c
		},
	}
}

// newConsumer returns a consumer of the stream, which is set up.
func newConsumer(t *testing.T, client redis.UniversalClient, p inbox.Processor, cfg inboxredis.Config) *inboxredis.Consumer {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c, err := inboxredis.NewConsumer(client, stream, p, cfg)
	noError(t, err)
	noError(t, c.Setup(t.Context()))
	return c
}

// start runs a consumer until stop is called, which waits for its end.
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
	c, err := inboxredis.NewConsumer(client, stream, inbox.NewMux(), inboxredis.Config{})
	noError(t, err)
	want := func(texts ...string) {
		t.Helper()
		err := c.Check(t.Context())
		if joined, ok := err.(interface{ Unwrap() []error }); (err != nil) != (len(texts) > 0) || ok && len(joined.Unwrap()) != len(texts) {
			t.Errorf("%d findings wanted: %v", len(texts), err)
			return
		}
		for _, text := range texts {
			if _, mends := errors.AsType[interface {
				error
				Mend() string
			}](err); !mends || !strings.Contains(err.Error(), text) {
				t.Errorf("Check: %v, want a finding with %q", err, text)
			}
		}
	}
	want(`stream "orders" has no group "orders"; call Consumer.Setup`, `stream "{orders}:orders:retries" has no group`)
	for range 2 {
		noError(t, c.Setup(t.Context()))
	}
	want()
	// Who reads a group, or did lately, is behind and no finding.
	setup(t, client, "read")
	publish(t, client, event())
	noError(t, client.XReadGroup(t.Context(), &redis.XReadGroupArgs{Group: "read", Consumer: "c", Streams: []string{stream, ">"}}).Err())
	want()
	setup(t, client, "deserted")
	want(`nobody reads the group "deserted", which is 1 messages behind`)
	noError(t, client.XGroupDestroy(t.Context(), stream, "deserted").Err())
	noError(t, errors.Join(client.ConfigSet(t.Context(), "maxmemory", "100mb").Err(), client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru").Err()))
	want("maxmemory-policy is allkeys-lru: Redis may evict whole streams")
	noError(t, client.ConfigSet(t.Context(), "maxmemory-policy", "noeviction").Err())
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
	ordered, err := inboxredis.NewConsumer(client, stream, inbox.NewMux(), inboxredis.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true}})
	noError(t, err)
	if err := ordered.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "use a processor with a ledger") {
		t.Errorf("an ordered consumer without a ledger: %v", err)
	}
}

func TestConsumerConfig(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	_, err := inboxredis.NewConsumer(nil, "a}b", nil, inboxredis.Config{Timeout: -time.Second, ConsumerConfig: inbox.ConsumerConfig{Batch: -1}})
	for _, want := range []string{"client is nil", "no hash tag", "processor is nil", "Config.Timeout", "ConsumerConfig.Batch"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if _, err := inboxredis.NewConsumer(client, "orders", inbox.NewMux(), inboxredis.Config{}); err != nil {
		t.Error(err)
	}
}
