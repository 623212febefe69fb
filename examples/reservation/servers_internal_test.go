package main

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/amqptest"
)

// A node that is gone costs no connection, wherever the search begins.
func TestDialAny(t *testing.T) {
	t.Parallel()
	dial := dialAny([]string{"amqp://127.0.0.1:1/", amqptest.New(t).URL}, amqp.Config{})
	for range 20 {
		conn, err := dial(t.Context())
		noError(t, err)
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := dialAny([]string{"amqp://127.0.0.1:1/", "amqp://127.0.0.1:2/"}, amqp.Config{})(t.Context()); err == nil {
		t.Error("nodes that are gone are reached")
	}
}

func TestPartOf(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	part, cancelPart := partOf(ctx, 3)
	defer cancelPart()
	if end, ok := part.Deadline(); !ok || time.Until(end) > 20*time.Minute || time.Until(end) < 10*time.Minute {
		t.Errorf("a third of an hour ends at %v", end)
	}
}

func TestNewRedis(t *testing.T) {
	t.Parallel()
	one, err := newRedis("redis://127.0.0.1:1/2")
	if c, ok := one.(*redis.Client); err != nil || !ok || c.Options().DB != 2 || c.Close() != nil {
		t.Errorf("one server: %T, %v", one, err)
	}
	many, err := newRedis("redis://127.0.0.1:1?addr=127.0.0.1:2&addr=127.0.0.1:3")
	noError(t, err)
	c, ok := many.(*redis.ClusterClient)
	if !ok {
		t.Fatalf("three nodes: %T", many)
	}
	slices.Sort(c.Options().Addrs)
	if got := strings.Join(c.Options().Addrs, " "); got != "127.0.0.1:1 127.0.0.1:2 127.0.0.1:3" || !c.Options().ContextTimeoutEnabled || c.Close() != nil {
		t.Errorf("three nodes: %s", got)
	}
}

func TestAddressesOfBrokers(t *testing.T) {
	t.Parallel()
	for addresses, fine := range map[string]bool{
		"amqp://a/": true, "amqp://a/,amqps://b/": true, "amqp://a/,http://b/": false, "amqp://a/,": false,
	} {
		getenv := func(name string) string {
			if name == "AMQP_URL" {
				return addresses
			}
			return nowhere(name)
		}
		if _, err := parseConfig([]string{"-backend=services"}, getenv, io.Discard); (err == nil) != fine {
			t.Errorf("%s: %v", addresses, err)
		}
	}
}
