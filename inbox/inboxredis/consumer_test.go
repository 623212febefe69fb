package inboxredis_test

import (
	"context"
	"log/slog"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/redistest"
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
				Runs: runs, Ordered: cfg.Ordered, Partitioned: cfg.Partitions > 1,
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
			if err != nil {
				t.Fatal(err)
			}
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
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
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
