package idempotencyredis_test

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
)

// A cluster client that dials nowhere tells the names by the slots it asks for.
func TestKeyNames(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		client func(hook redis.Hook) redis.UniversalClient
		cfg    idempotencyredis.Config
		key    driver.Key
		want   []string
	}{
		"literal": {
			single,
			idempotencyredis.Config{},
			key,
			[]string{"idempotency:" + string(key), "idempotency:lock:" + string(key)},
		},
		"prefix": {
			single,
			idempotencyredis.Config{Prefix: "app:idem"},
			key,
			[]string{"app:idem:" + string(key), "app:idem:lock:" + string(key)},
		},
		"scope": {
			single,
			idempotencyredis.Config{},
			driver.Key(idempotency.Key(key).In("{a}:b")),
			[]string{"idempotency:@%7Ba%7D%3Ab:" + string(key), "idempotency:lock:@%7Ba%7D%3Ab:" + string(key)},
		},
		"asked for": {
			single,
			idempotencyredis.Config{HashTag: true},
			key,
			[]string{"idempotency:{" + string(key) + "}", "idempotency:lock:{" + string(key) + "}"},
		},
		"cluster": {
			cluster,
			idempotencyredis.Config{},
			driver.Key(idempotency.Key(key).In("a")),
			[]string{"idempotency:{@a:" + string(key) + "}", "idempotency:lock:{@a:" + string(key) + "}"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hook := &names{}
			client := tt.client(hook)
			defer func() { _ = client.Close() }()
			s := newStore(t, client, tt.cfg)
			_, _ = s.Begin(t.Context(), driver.NewClaim(tt.key, fp))
			if strings.Join(hook.keys, " ") != strings.Join(tt.want, " ") {
				t.Errorf("keys %q, want %q", hook.keys, tt.want)
			}
		})
	}
}

func nowhere(context.Context, string, string) (net.Conn, error) { return nil, net.ErrClosed }

func single(hook redis.Hook) redis.UniversalClient {
	c := redis.NewClient(&redis.Options{Dialer: nowhere})
	c.AddHook(hook)
	return c
}

func cluster(hook redis.Hook) redis.UniversalClient {
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"nowhere:1"}, Dialer: nowhere})
	c.AddHook(hook)
	return c
}

// names remembers the keys of a script and sends nothing.
type names struct {
	trips
	keys []string
}

func (h *names) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		if args := cmd.Args(); len(args) > 4 && args[0] == "evalsha" {
			h.keys = []string{args[3].(string), args[4].(string)}
		}
		cmd.SetErr(net.ErrClosed)
		return net.ErrClosed
	}
}
