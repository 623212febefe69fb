package ratelimitredis_test

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// While Redis is down, each of four processes admits a quarter of the limit.
func ExampleNew() {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1}) // no server
	defer func() { _ = client.Close() }()
	limiter, err := ratelimitredis.New(client, ratelimitredis.Config{
		Replicas: 4,
		Logger:   slog.New(slog.DiscardHandler),
	})
	if err != nil {
		panic(err)
	}
	user := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 8}, Key: "42"}
	for range 3 {
		d, err := limiter.Allow(context.Background(), user)
		if err != nil {
			panic(err)
		}
		fmt.Println("allowed:", d.Allowed, "without Redis:", d.Fallback)
	}
	// Output:
	// allowed: true without Redis: true
	// allowed: true without Redis: true
	// allowed: false without Redis: true
}
