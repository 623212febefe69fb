package idempotencyredis_test

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestOnCluster(t *testing.T) {
	t.Parallel()
	client, _ := redistest.Cluster(t)
	store := func(t *testing.T, cfg idempotencyredis.Config) driver.Store {
		cfg.Prefix = "test:" + rand.Text()
		return newStore(t, client, cfg)
	}
	backend := conformance.Backend{
		New:   func(t *testing.T) driver.Store { return store(t, idempotencyredis.Config{}) },
		Brief: func(t *testing.T) driver.Store { return store(t, idempotencyredis.Config{Lease: 12 * time.Second}) },
		Fading: func(t *testing.T) (driver.Store, time.Duration) {
			cfg := idempotencyredis.Config{Lease: 5 * time.Second, Retention: 5 * time.Second}
			return store(t, cfg), cfg.Retention
		},
	}
	t.Run("store", func(t *testing.T) { conformance.TestStore(t, backend) })
	t.Run("middleware", func(t *testing.T) { conformance.TestMiddleware(t, backend) })

	// The suites above mean something only if the keys are spread.
	spread := newStore(t, client, idempotencyredis.Config{})
	for range 60 {
		if _, err := spread.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp)); err != nil {
			t.Fatal(err)
		}
	}
	if used, err := redistest.NodesInUse(t.Context(), client); err != nil || used != 3 {
		t.Errorf("%d nodes hold keys, %v; want 3", used, err)
	}
	if err := spread.Check(t.Context()); err != nil {
		t.Errorf("Check = %v", err)
	}
}

// The connections that are tested are those to the node that was silent.
func TestSilentNode(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	s := newStore(t, client, idempotencyredis.Config{})
	for range 60 { // there are connections to every node
		if _, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp)); err != nil {
			t.Fatal(err)
		}
	}
	tested := make(testedKeys, 1000)
	client.AddHook(tested)
	for _, server := range servers {
		if err := server.Pause(); err != nil {
			t.Fatal(err)
		}
	}
	claim := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
	if _, err := s.Begin(t.Context(), claim); err == nil {
		t.Error("a silent cluster answered")
	}
	for _, server := range servers {
		if err := server.Resume(); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case name := <-tested:
		if !strings.Contains(name, "{"+string(claim.Key)+"}") {
			t.Errorf("tested with the key %q", name)
		}
	case <-time.After(testenv.Patience):
		t.Error("no connection was tested")
	}
}

// testedKeys gets the keys of the commands that test idle connections.
type testedKeys chan string

func (h testedKeys) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h testedKeys) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (h testedKeys) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "mget" {
			h <- cmd.Args()[1].(string)
		}
		return next(ctx, cmd)
	}
}
