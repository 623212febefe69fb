//go:build interop

package main

import (
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// redisServer is a database of Redis: streams orders and orders.failed, a group for each side.
type redisServer struct{ client *redis.Client }

func newRedis(t *testing.T) *redisServer {
	t.Helper()
	return &redisServer{redistest.Client(t, redistest.URL(t))}
}

func (b *redisServer) kind() string { return "redis" }

func (b *redisServer) task() task {
	options := b.client.Options()
	return task{"broker": "redis", "dsn": "redis://" + options.Addr, "dbindex": options.DB}
}

func (b *redisServer) dead() string { return "{orders}:go:failed.unrecoverable" }

func (b *redisServer) publish(t *testing.T, form format.Symfony, msgs ...outbox.Message) {
	t.Helper()
	p, err := outboxredis.NewPublisher(b.client, outboxredis.Config{Stream: "orders", Format: form})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range msgs {
		done := make(chan error, 1)
		p.Publish(t.Context(), m, func(err error) { done <- err })
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

func (b *redisServer) consume(t *testing.T, place string, form format.Symfony, handle func(*inbox.Message) error) {
	t.Helper()
	c, err := inboxredis.NewConsumer(b.client, place, processor(handle), inboxredis.Config{
		ConsumerConfig: consumerConfig(), KeepProcessed: true, Format: form,
	})
	if err != nil {
		t.Fatal(err)
	}
	start(t, c)
}

func (b *redisServer) tap(t *testing.T, place string) func() []fixture {
	t.Helper()
	before := b.client.XLen(t.Context(), place).Val()
	return func() []fixture { return b.entries(t, place)[before:] }
}

func (b *redisServer) waiting(t *testing.T) []fixture { return b.entries(t, "orders") }

func (b *redisServer) entries(t *testing.T, stream string) (seen []fixture) {
	t.Helper()
	entries, err := b.client.XRange(t.Context(), stream, "-", "+").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		for _, value := range e.Values {
			if strings.ContainsRune(value.(string), '\uFFFD') {
				t.Fatal("a field is not UTF-8")
			}
		}
		seen = append(seen, fixture{Fields: e.Values})
	}
	return seen
}
