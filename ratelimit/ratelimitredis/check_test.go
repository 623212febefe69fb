package ratelimitredis_test

import (
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	if found, err := open(t, client, ratelimitredis.Config{}).Check(t.Context()); err != nil || len(found) > 0 {
		t.Errorf("found %v, %v", found, err)
	}
	gone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	defer func() {
		if err := gone.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := open(t, gone, ratelimitredis.Config{}).Check(t.Context()); err == nil {
		t.Error("a server that is not there passes")
	}
}

// disguised is a client that does not show that it is one of a cluster.
type disguised struct{ redis.UniversalClient }

func TestCheckFindsWhatDecisionsWouldMeet(t *testing.T) {
	t.Parallel()
	cluster, _ := redistest.Cluster(t)
	for name, cfg := range map[string]ratelimitredis.Config{"a tag": {Tag: "rl"}, "shards": {Shards: 5}} {
		if found, err := open(t, disguised{cluster}, cfg).Check(t.Context()); err != nil || len(found) > 0 {
			t.Errorf("%s: found %v, %v", name, found, err)
		}
	}
	if found, err := open(t, disguised{cluster}, ratelimitredis.Config{}).Check(t.Context()); err != nil || len(found) != 1 || !strings.Contains(found[0].Mend, "Tag") {
		t.Errorf("without a tag on a cluster: found %v, %v", found, err)
	}

	server := testenv.Private(t, testenv.Redis)
	client := redistest.Client(t, server.URL())
	if err := client.ACLSetUser(t.Context(), "weak", "on", ">secret", "~*", "+@all", "-evalsha", "-eval").Err(); err != nil {
		t.Fatal(err)
	}
	opts := *client.Options()
	opts.Username, opts.Password = "weak", "secret"
	weak := redis.NewClient(&opts)
	defer func() {
		if err := weak.Close(); err != nil {
			t.Error(err)
		}
	}()
	if found, err := open(t, weak, ratelimitredis.Config{}).Check(t.Context()); err != nil || len(found) != 1 {
		t.Errorf("a user who may not run scripts: found %v, %v", found, err)
	}
	if err := client.ConfigSet(t.Context(), "maxmemory", "100mb").Err(); err != nil {
		t.Fatal(err)
	}
	if err := client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru").Err(); err != nil {
		t.Fatal(err)
	}
	if found, err := open(t, client, ratelimitredis.Config{}).Check(t.Context()); err != nil || len(found) != 1 || !strings.Contains(found[0].Problem, "allkeys-lru") {
		t.Errorf("with eviction: found %v, %v", found, err)
	}
}
