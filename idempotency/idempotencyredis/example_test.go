package idempotencyredis_test

import (
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
)

// New does not contact the server. It reports every configuration error at once.
func ExampleNew() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true})
	defer func() { _ = client.Close() }()

	_, err := idempotencyredis.New(client, idempotencyredis.Config{})
	fmt.Println(err)
	_, err = idempotencyredis.New(client, idempotencyredis.Config{Prefix: "{shop}", Lease: 1})
	fmt.Println(err)
	// Output:
	// <nil>
	// idempotencyredis: Prefix must not contain braces
	// idempotencyredis: Lease must be at least 10ms
}
