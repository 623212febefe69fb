package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
)

const watermillStreams = "watermill router on its Redis subscriber, dedup insert"

// benchInboxStreams empties a Redis stream into Postgres as the other parts empty a queue.
func benchInboxStreams(ctx context.Context, b *bench) {
	i := newIntake(ctx, b)
	s := &streamIntake{i, "holdfast_bench_" + strconv.FormatInt(time.Now().UnixNano(), 10)}
	b.atEnd(func() error { return s.clear(context.WithoutCancel(ctx)) })
	const handlers = 8
	single := b.measure(ctx, table{
		title:      fmt.Sprintf("inbox, %d handlers, %d messages of %d bytes, Redis stream", handlers, b.messages/8, len(body)),
		columns:    inboxColumns,
		yardsticks: []string{rawSingle, watermillStreams},
		contenders: []contender{
			s.contender(rawSingle, 8, s.rawSingle(handlers)),
			s.contender(inboxSingle, 8, s.holdfast(handlers, 1, i.perMessage)),
			s.contender(watermillStreams, 8, s.watermill(handlers)),
		},
	})
	b.atLeast(0.85, single.ratio(inboxSingle, rawSingle), fmt.Sprintf("of the raw consumer of a Redis stream, a transaction each, %d handlers", handlers))
	const most = 32
	batches := b.measure(ctx, table{
		title:      fmt.Sprintf("inbox, batches, %d messages of %d bytes, Redis stream", b.messages, len(body)),
		columns:    inboxColumns,
		yardsticks: []string{rawBatch, watermillStreams},
		contenders: []contender{
			s.contender(rawBatch, 1, s.rawBatch(200)),
			s.contender(inboxMany, 1, s.holdfast(1, 200, i.batchHandler)),
			s.contender(inboxManyTwo, 1, s.holdfast(2, 200, i.batchHandler)),
			s.contender(inboxSavepoint, 3, s.holdfast(1, 200, i.perMessage)),
			s.contender(watermillStreams, 6, s.watermill(most)),
		},
	})
	b.atLeast(0.85, batches.ratio(inboxMany, rawBatch), "of the raw batch consumer of a Redis stream, a batch handler")
	b.atLeast(3, batches.ratio(inboxMany, watermillStreams), fmt.Sprintf("x watermill on a Redis stream with %d handlers, a batch handler", most))
}

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

// read takes up to so many messages of the stream as one does by hand.
func (s *streamIntake) read(ctx context.Context, count int) ([]redis.XMessage, error) {
	found, err := s.redis.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: streamGroup, Consumer: "raw", Streams: []string{s.stream, ">"}, Count: int64(count), Block: time.Second,
	}).Result()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return found[0].Messages, nil
}

// rawSingle is a consumer as one writes it by hand, with as many goroutines.
func (s *streamIntake) rawSingle(handlers int) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		watch.start()
		defer watch.stop()
		work := make(chan redis.XMessage)
		errs := make([]error, handlers)
		var running sync.WaitGroup
		for w := range handlers {
			running.Go(func() {
				for m := range work {
					if err := s.rawOne(ctx, m); err != nil && errs[w] == nil {
						errs[w] = err
					}
				}
			})
		}
		var err error
		for left := n; left > 0 && err == nil; {
			var messages []redis.XMessage
			messages, err = s.read(ctx, 2*handlers)
			for _, m := range messages {
				work <- m
			}
			left -= len(messages)
		}
		close(work)
		running.Wait()
		check(errors.Join(append(errs, err)...))
	}
}
