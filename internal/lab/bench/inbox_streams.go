package main

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// streamIntake is an intake whose messages are in a Redis stream.
type streamIntake struct {
	*intake
	stream string
}

const streamGroup = "bench"

func (s *streamIntake) contender(name string, part int, run intakeRun) contender {
	return contender{name, func(ctx context.Context, length time.Duration) sample {
		n := s.bench.portion(length, part)
		s.fill(ctx, n)
		watch := stopwatch{bench: s.bench}
		run(ctx, n, &watch)
		check(watch.err)
		s.expect(ctx, n)
		return watch.sample(n)
	}}
}

func (s *streamIntake) clear(ctx context.Context) error {
	return s.redis.Del(ctx, s.stream, "{"+s.stream+"}:"+streamGroup+":retries").Err()
}

// fill makes every run start from empty tables and a new stream with n messages.
func (s *streamIntake) fill(ctx context.Context, n int) {
	must(s.pool.Exec(ctx, "TRUNCATE holdfast_inbox, bench_events"))
	check(s.clear(ctx))
	consumer := s.consumer(inbox.NewMux(), inbox.ConsumerConfig{})
	check(consumer.Setup(ctx))
	for n > 0 {
		pipe := s.redis.Pipeline()
		for range min(n, 1000) {
			pipe.XAdd(ctx, &redis.XAddArgs{Stream: s.stream, Values: []any{
				"id", ids.New().String(), "name", eventName, "content-type", "application/json", "key", "",
				"created-at", time.Now().UTC().Format(time.RFC3339Nano), "headers", "{}", "body", body,
			}})
			n--
		}
		must(pipe.Exec(ctx))
	}
}

// expect is an error unless each message took effect once and is not pending.
func (s *streamIntake) expect(ctx context.Context, n int) {
	var effects int
	check(s.pool.QueryRow(ctx, "SELECT count(*) FROM bench_events").Scan(&effects))
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) { // the last acknowledgements may be on their way
		pending := must(s.redis.XPending(ctx, s.stream, streamGroup).Result())
		if effects == n && pending.Count == 0 {
			return
		}
		if time.Since(begin) > 10*time.Second {
			check(fmt.Errorf("%d effects of %d messages, %d pending", effects, n, pending.Count))
			return
		}
	}
}

func (s *streamIntake) consumer(p inbox.Processor, cfg inbox.ConsumerConfig) *inboxredis.Consumer {
	cfg.Logger = quiet
	return must(inboxredis.NewConsumer(s.redis, s.stream, p, inboxredis.Config{Group: streamGroup, ConsumerConfig: cfg}))
}

// counted tells when so many messages went through, as watermill's handlers do.
type counted struct {
	inbox.Processor
	done *finish
}

func (c counted) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := c.Processor.Process(ctx, msgs)
	for _, err := range results {
		if err == nil {
			c.done.one()
		}
	}
	return results
}

// holdfast runs a consumer until it has processed n messages. Its end is not measured: it may wait a
// second for a read that Redis keeps.
func (s *streamIntake) holdfast(workers, batch int, newProcessor func() inbox.Processor) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		processor := newProcessor()
		consumer := s.consumer(counted{processor, newFinish(n, watch)}, inbox.ConsumerConfig{Concurrency: workers, Batch: batch, MessageLimit: n})
		watch.start()
		check(consumer.Run(ctx))
	}
}
