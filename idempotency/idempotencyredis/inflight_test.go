package idempotencyredis_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Claims are in flight from Begin until Complete, Release or the end of their lease, and those of another prefix are another
// store's.
func TestInFlight(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	const odd = `a*[b]?\c`
	s := newStore(t, client, idempotencyredis.Config{Prefix: odd})
	wantInFlight(t, s, 0)
	var claims []driver.Claim
	for range 5 {
		claims = append(claims, driver.NewClaim(driver.Key(idempotency.NewKey()), fp))
		begin(t, s, claims[len(claims)-1])
	}
	begin(t, newStore(t, client, idempotencyredis.Config{Prefix: "a"}), claims[0])
	begin(t, newStore(t, client, idempotencyredis.Config{Prefix: "axb\\c"}), claims[0])
	wantInFlight(t, s, 5)
	if err := s.Complete(t.Context(), claims[0], driver.Response{Status: 200}); err != nil {
		t.Error(err)
	}
	if err := s.Release(t.Context(), claims[1]); err != nil {
		t.Error(err)
	}
	wantInFlight(t, s, 3)
	brief := newStore(t, client, idempotencyredis.Config{Prefix: "brief", Lease: 50 * time.Millisecond})
	begin(t, brief, claims[0])
	testenv.Eventually(t, func() error {
		if n, _, err := brief.InFlight(t.Context()); n != 0 || err != nil {
			return fmt.Errorf("%d in flight, %w", n, err)
		}
		return nil
	})
}

// InFlight estimates the number in a database with more keys than it goes through, also where its time is up before the first
// keys have come. Locks are a quarter of the keys here.
func TestInFlightOfManyKeys(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	const locks = 10_000
	pipe := client.Pipeline()
	for n := range locks {
		pipe.Set(t.Context(), fmt.Sprintf("idempotency:lock:%d", n), "token", time.Minute)
		for other := range 3 {
			pipe.Set(t.Context(), fmt.Sprintf("other:%d:%d", n, other), "", 0)
		}
	}
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := newStore(t, client, idempotencyredis.Config{})
	n, exact, err := s.InFlightOf(t.Context(), 5_000, testenv.Patience)
	if err != nil || exact || n < locks*9/10 || n > locks*11/10 {
		t.Errorf("%d, exact: %v, %v: want about %d", n, exact, err, locks)
	}
	if n, exact, err := s.InFlightOf(t.Context(), 5_000, 0); err != nil || exact || n < locks/2 || n > locks*2 {
		t.Errorf("in no time %d, exact: %v, %v: want some %d", n, exact, err, locks)
	}
}

// disguised is a client of a kind that is not known.
type disguised struct{ redis.UniversalClient }

// All nodes of a cluster and all shards of a ring are asked. The keys of the one node that answers are not passed
// off as those of all nodes behind a client of an unknown kind.
func testInFlightOfNodes(t *testing.T, cluster *redis.ClusterClient) {
	s := newStore(t, disguised{cluster}, idempotencyredis.Config{HashTag: true})
	begin(t, s, driver.NewClaim(driver.Key(idempotency.NewKey()), fp))
	if n, exact, err := s.InFlight(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%d, exact: %v, %v: want that it is unsupported", n, exact, err)
	}
	shards := map[string]*redis.Options{}
	for _, addr := range []string{"one:1", "two:1"} {
		opts, err := redis.ParseURL(redistest.URL(t))
		must(t, err)
		shards[addr] = opts
	}
	ring := redis.NewRing(&redis.RingOptions{
		Addrs:     map[string]string{"one": "one:1", "two": "two:1"},
		NewClient: func(o *redis.Options) *redis.Client { return redis.NewClient(shards[o.Addr]) },
	})
	defer func() { _ = ring.Close() }()
	for name, client := range map[string]redis.UniversalClient{"cluster": cluster, "ring": ring} {
		s := newStore(t, client, idempotencyredis.Config{Prefix: "inflight"})
		const claims = 60
		for range claims {
			begin(t, s, driver.NewClaim(driver.Key(idempotency.NewKey()), fp))
		}
		if n, exact, err := s.InFlight(t.Context()); n != claims || !exact || err != nil {
			t.Errorf("%s: %d in flight, %v; want %d", name, n, err, claims)
		}
	}
}

// slowScans answers each SCAN after a while, with one lock and as if there were more keys.
type slowScans struct{ trips }

func (*slowScans) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		switch cmd := cmd.(type) {
		case *redis.ScanCmd:
			time.Sleep(100 * time.Millisecond)
			cmd.SetVal([]string{fmt.Sprint("idempotency:lock:", cmd.Args()[1])}, cmd.Args()[1].(uint64)+1)
		case *redis.IntCmd:
			cmd.SetVal(1_000_000)
		}
		return nil
	}
}

// A server that answers slowly is asked for no longer than the caller waits, and is not taken for silent: the number is an
// estimate from less.
func TestInFlightInAHurry(t *testing.T) {
	t.Parallel()
	for _, has := range []time.Duration{time.Minute, time.Second} {
		synctest.Test(t, func(t *testing.T) {
			client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", Dialer: nowhere})
			client.AddHook(&slowScans{})
			defer func() { _ = client.Close() }()
			ctx, cancel := context.WithTimeout(t.Context(), has)
			defer cancel()
			began := time.Now()
			n, exact, err := newStore(t, client, idempotencyredis.Config{}).InFlight(ctx)
			if took := time.Since(began); n != 1000 || exact || err != nil || took > has/2 {
				t.Errorf("%v: %d, %v after %v; want 1000", has, n, err, took)
			}
		})
	}
}

func wantInFlight(t *testing.T, s *idempotencyredis.Store, want int) {
	t.Helper()
	if n, exact, err := s.InFlight(t.Context()); n != want || !exact || err != nil {
		t.Errorf("%d in flight, %v; want %d", n, err, want)
	}
}
