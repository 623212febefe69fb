package idempotencyredis_test

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

// backend gives the subtests stores on one client: keys are random. names returns the names of a key's record and lock.
func backend(client redis.UniversalClient, cfg idempotencyredis.Config, names func(driver.Key) []string) conformance.Backend {
	return conformance.Backend{
		New: func(t *testing.T) driver.Store { return newStore(t, client, cfg) },
		Pass: func(t *testing.T, key driver.Key, d time.Duration) {
			t.Helper()
			for _, name := range names(key) {
				ttl, err := client.PTTL(t.Context(), name).Result()
				if err == nil && ttl > 0 { // an end in the past deletes the key
					err = client.PExpire(t.Context(), name, ttl-d).Err()
				}
				if err != nil {
					t.Error(err)
				}
			}
		},
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend(redistest.New(t), idempotencyredis.Config{}, func(key driver.Key) []string {
		return []string{"idempotency:" + string(key), "idempotency:lock:" + string(key)}
	}))
}

func TestStoreOnCluster(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "the scripts are those of TestStore; TestCluster covers what a cluster changes")
	client, _ := redistest.Cluster(t)
	prefix := "test:" + rand.Text()
	conformance.TestStore(t, backend(client, idempotencyredis.Config{Prefix: prefix}, func(key driver.Key) []string {
		return []string{prefix + ":{" + string(key) + "}", prefix + ":lock:{" + string(key) + "}"}
	}))
}

// TestCluster has one cluster for all: three servers take seconds to agree.
func TestCluster(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	t.Run("keys are on all nodes", func(t *testing.T) {
		s := newStore(t, client, idempotencyredis.Config{})
		for range 60 {
			c := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
			begin(t, s, c)
			if err := s.Complete(t.Context(), c, driver.Response{Status: 201}); err != nil {
				t.Error(err)
			}
		}
		if used, err := redistest.NodesInUse(t.Context(), client); err != nil || used != 3 {
			t.Errorf("%d nodes hold keys, %v; want 3", used, err)
		}
		if err := s.Check(t.Context()); err != nil {
			t.Errorf("Check = %v", err)
		}
	})
	t.Run("claims in flight", func(t *testing.T) { testInFlightOfNodes(t, client) })
	t.Run("a slot moves during a run", func(t *testing.T) { testSlotMovesDuringARun(t, client, servers) })
	t.Run("a silent node", func(t *testing.T) { testSilentNode(t, client, servers) })
}

// As long as one of a key's two names is on another node than the other, no script can run on them. That does
// not cost the result of a run.
func testSlotMovesDuringARun(t *testing.T, client *redis.ClusterClient, servers []*testenv.Server) {
	s := newStore(t, client, idempotencyredis.Config{})
	move := redistest.NewMove(t, client, servers, "{"+string(key)+"}")
	moved := make(chan error, 1)
	got, _, err := idempotency.Do(t.Context(), s, idempotency.Key(key), nil, func(ctx context.Context) (int, error) {
		err := move.Begin(ctx)
		time.AfterFunc(300*time.Millisecond, func() { moved <- errors.Join(move.Keys(t.Context()), move.End(t.Context())) }) // timing: the keys move while the call waits
		return 7, err
	})
	if err := errors.Join(err, <-moved); err != nil || got != 7 {
		t.Fatalf("Do = %d, %v", got, err)
	}
	got, replayed, err := idempotency.Do(t.Context(), s, idempotency.Key(key), nil, func(context.Context) (int, error) { return 8, nil })
	if err != nil || !replayed || got != 7 {
		t.Errorf("again: %d, %v, %v", got, replayed, err)
	}
}

// The connections that are tested are those to the node that was silent.
func testSilentNode(t *testing.T, client *redis.ClusterClient, servers []*testenv.Server) {
	testenv.Nightly(t, "it waits for a silent cluster")
	s := newStore(t, client, idempotencyredis.Config{})
	for range 60 { // there are connections to every node
		if _, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp)); err != nil {
			t.Fatal(err)
		}
	}
	tested := make(testedKeys, 1000)
	client.AddHook(tested)
	for _, server := range servers {
		must(t, server.Pause())
	}
	claim := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
	if _, err := s.Begin(t.Context(), claim); err == nil {
		t.Error("a silent cluster answered")
	}
	for _, server := range servers {
		must(t, server.Resume())
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

// A replica that has taken over takes keys, though nobody refers the client to it.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "a replica takes seconds to take over")
	client, failOver := redistest.Failover(t)
	s := newStore(t, client, idempotencyredis.Config{})
	begin := func() error {
		_, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp))
		return err
	}
	must(t, begin())
	failOver()
	testenv.Eventually(t, begin)
}
