package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	// slowKey is there while consumers are to be slow. Those with -trials ask for it, wherever they run.
	slowKey = "{reservation.flow}:slow"
	// slowness is how long a slow consumer takes for a message.
	slowness = 2 * time.Second
	// slowFor is after how long consumers that were forgotten are fast again.
	slowFor = 10 * time.Minute
	// slowTimeout bounds the question, whose answer a consumer waits for.
	slowTimeout = 500 * time.Millisecond
	// maxDead is how many messages may wait or be dead before no more poison is sent.
	maxDead = 1000
)

// trials make trouble on real servers. They implement web.Trials.
type trials struct {
	transactor *txretry.Manager
	messages   *outboxpgx.Store
	consumer   consumer
	redis      redis.UniversalClient
}

func (p *parts) trials() trials {
	return trials{transactor: p.transactor, messages: p.messages, consumer: p.broker.consumer, redis: p.servers.redis}
}

// Poison goes the way of every message, through the outbox: the consumer may be in another process.
func (t trials) Poison(ctx context.Context) error {
	depth, err := t.messages.Depth(ctx)
	if err != nil {
		return err
	}
	queue, err := t.consumer.Stats(ctx)
	if err != nil {
		return err
	}
	if n := inOutbox(depth) + inQueue(queue) + dead(depth, queue); n >= maxDead {
		return fmt.Errorf("%d messages wait or are dead, which is enough", n)
	}
	return t.transactor.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return t.messages.Write(ctx, tx, messages.Poison())
	})
}

// SlowDown implements web.Trials.
func (t trials) SlowDown(ctx context.Context, on bool) error {
	if on {
		return t.redis.Set(ctx, slowKey, 1, slowFor).Err()
	}
	return t.redis.Del(ctx, slowKey).Err()
}

// Slow implements web.Trials.
func (t trials) Slow(ctx context.Context) (bool, error) {
	n, err := t.redis.Exists(ctx, slowKey).Result()
	return n > 0, err
}

// delay is how long a consumer waits before it processes a message. Where Redis cannot tell, it is not slow.
func (t trials) delay(ctx context.Context) time.Duration {
	ctx, cancel := context.WithTimeout(ctx, slowTimeout)
	defer cancel()
	if slow, err := t.Slow(ctx); err != nil || !slow {
		return 0
	}
	return slowness
}
