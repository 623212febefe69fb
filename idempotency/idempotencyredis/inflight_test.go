package idempotencyredis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

// Claims are in flight from Begin until Complete, Release or the end of their lease. Claims with another prefix
// belong to another store.
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

// InFlight estimates the number if the database has more keys than it reads, even if its time is over before the
// first keys have arrived. Here a quarter of the keys are locks.
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

// disguised is a client of an unknown type.
type disguised struct{ redis.UniversalClient }

// InFlight reads all nodes of a cluster and all shards of a ring. A client of an unknown type may have further nodes,
// so its result is an error, not the count of one node.
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

// slowScans answers each SCAN after a while, with one lock and a cursor for more keys.
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

// InFlight reads a slow server no longer than the caller waits, and does not treat it as silent. The result is an
// estimate from fewer keys.
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

// If a server does not have the scripts, they are loaded, in pipelines too.
func TestScriptsAreTaught(t *testing.T) {
	t.Parallel()
	client := redistest.Client(t, testenv.Private(t, testenv.Redis).URL()) // other tests need the scripts on their server
	s := newStore(t, client, idempotencyredis.Config{})
	for range 10 {
		var wg sync.WaitGroup
		for range 80 {
			wg.Go(func() {
				c := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
				if out, err := s.Begin(t.Context(), c); err != nil || out.State != driver.Acquired {
					t.Errorf("Begin = %+v, %v", out, err)
				}
				if err := s.Complete(t.Context(), c, driver.Response{Status: 200}); err != nil {
					t.Error(err)
				}
			})
		}
		must(t, client.ScriptFlush(t.Context()).Err())
		wg.Wait()
	}
}

// If a connection falls silent in the middle of a script, the caller waits 2 s and tries again on another connection.
// That is no error, because every script may run again.
func TestSilentInTheMiddleOfAScript(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		s := newStore(t, client, idempotencyredis.Config{Lease: time.Hour, Retention: time.Hour})
		for _, deliver := range []bool{false, true} {
			c := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
			step := func(what string, take func(ctx context.Context) error) {
				t.Helper()
				if err := client.Ping(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
				before := server.Silenced()
				server.SilenceOn(testenv.Silence{On: "evalsha", Deliver: deliver})
				start := time.Now()
				if err := take(t.Context()); err != nil || server.Silenced() != before+1 {
					t.Errorf("%s, delivered %v: %v, %d connections silent", what, deliver, err, server.Silenced()-before)
				}
				silent.Took(t, what, start, 2*time.Second)
			}
			begin := func(want driver.State) func(ctx context.Context) error {
				return func(ctx context.Context) error {
					out, err := s.Begin(ctx, c)
					if err == nil && out.State != want {
						err = fmt.Errorf("%+v", out)
					}
					return err
				}
			}
			step("begin", begin(driver.Acquired))
			step("extend", func(ctx context.Context) error { return s.Extend(ctx, c) })
			step("release", func(ctx context.Context) error {
				err := s.Release(ctx, c)
				if deliver && errors.Is(err, idempotency.ErrLeaseLost) {
					return nil // the first Release freed the key
				}
				return err
			})
			step("begin again", begin(driver.Acquired))
			step("complete", func(ctx context.Context) error { return s.Complete(ctx, c, driver.Response{Status: 201}) })
			step("replay", begin(driver.Completed))
		}
	})
}

// Calls that wait behind silent connections are answered on other connections.
func TestGatheredTripsOnSilentConnections(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		s := newStore(t, client, idempotencyredis.Config{})
		if _, err := s.Begin(t.Context(), driver.NewClaim(key, fp)); err != nil {
			t.Fatal(err)
		}
		server.SilenceOn(testenv.Silence{On: "evalsha", Connections: 4})
		start := time.Now()
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				out, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp))
				if err != nil || out.State != driver.Acquired {
					t.Errorf("Begin = %+v, %v", out, err)
				}
			})
		}
		time.Sleep(time.Second)
		server.SilenceOn(testenv.Silence{On: "nothing"}) // a few connections may have carried all calls: second tries are served
		if wg.Wait(); server.Silenced() == 0 || server.Silenced() > 4 {
			t.Errorf("%d connections fell silent", server.Silenced())
		}
		silent.Took(t, "the last", start, 2*time.Second)
	})
}

// All connections fall silent at once, as behind a router that forgot them. The first caller gets its answer after
// one or two waits, and all of them are closed.
func TestHalfOpenConnections(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, 0, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		s := newStore(t, client, idempotencyredis.Config{})
		silent.Fill(t, client, 40)
		server.SilenceConnections()
		start := time.Now()
		if _, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp)); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took != 2*time.Second && took != 4*time.Second { // 4 s: a second try before they are closed
			t.Errorf("Begin took %v", took)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if n := server.Kept(); n > 0 || server.Silenced() < 40 {
			t.Errorf("%d of %d silent connections are open", n, server.Silenced())
		}
	})
}

// Check reports within seconds that a server does not answer, and that a client has no timeout for it.
func TestCheckOfASilentServer(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		s := newStore(t, client, idempotencyredis.Config{})
		err := s.Check(t.Context())
		if forEver := !client.Options().ContextTimeoutEnabled; (err != nil) != forEver || len(findingsOf(err)) > 1 {
			t.Errorf("found %v", err)
		}
		server.Pause()
		start := time.Now()
		if err := s.Check(t.Context()); err == nil || len(findingsOf(err)) > 0 {
			t.Errorf("a silent server: %v", err)
		}
		silent.Took(t, "Check", start, 6*time.Second)
	})
}

// deaf is a connection that can lose the next answer and then breaks.
type deaf struct {
	net.Conn
	lose *atomic.Bool
}

func (d deaf) Read(p []byte) (int, error) {
	n, err := d.Conn.Read(p)
	if err == nil && d.lose.CompareAndSwap(true, false) {
		_ = d.Conn.Close()
		return 0, net.ErrClosed
	}
	return n, err
}

// The client sends a script again if its answer is lost.
func TestLostAnswers(t *testing.T) {
	t.Parallel()
	lose := &atomic.Bool{}
	opts := redistest.New(t).Options()
	client := redis.NewClient(&redis.Options{
		Network: opts.Network, Addr: opts.Addr, DB: opts.DB, Username: opts.Username, Password: opts.Password,
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			return deaf{conn, lose}, err
		},
	})
	defer func() { _ = client.Close() }()
	s := newStore(t, client, idempotencyredis.Config{})
	first, second := driver.NewClaim(key, fp), driver.NewClaim(key, fp)
	loses := func() {
		t.Helper()
		if lose.Swap(true) {
			t.Error("the answer before was not lost")
		}
	}
	begin(t, s, first) // connects, and loads the script

	loses()
	if out := begin(t, s, first); out.State != driver.Acquired {
		t.Errorf("Begin = %+v", out)
	}
	loses()
	if err := s.Extend(t.Context(), first); err != nil {
		t.Errorf("Extend = %v", err)
	}
	loses()
	// The key was free already, unless the lost answer was NOSCRIPT.
	if err := s.Release(t.Context(), first); err != nil && !errors.Is(err, idempotency.ErrLeaseLost) {
		t.Errorf("Release = %v; want ErrLeaseLost", err)
	}
	if out := begin(t, s, second); out.State != driver.Acquired {
		t.Errorf("after Release: %+v", out)
	}
	loses()
	if err := s.Complete(t.Context(), second, driver.Response{Status: 201, Body: []byte("one")}); err != nil {
		t.Errorf("Complete = %v", err)
	}
	loses()
	if out := begin(t, s, first); out.State != driver.Completed || string(out.Response.Body) != "one" {
		t.Errorf("replay = %+v", out)
	}
	if lose.Load() {
		t.Error("the last answer was not lost")
	}
}

// A server that hangs blocks no caller longer than the timeout. The keys of callers that gave up become free when the
// server continues.
func TestHungServer(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it stops a server under 1,000 requests and asserts a time")
	server := testenv.Private(t, testenv.Redis)
	opts, err := redis.ParseURL(server.URL())
	must(t, err)
	opts.ContextTimeoutEnabled = true
	client := redis.NewClient(opts)
	defer func() { _ = client.Close() }()
	protect, err := idempotency.NewMiddleware(newStore(t, client, idempotencyredis.Config{}), idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{
		Logger: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	var runs atomic.Int64
	h := protect(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { runs.Add(1) }))
	post := func(key idempotency.Key) int {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set(idempotency.Header, string(key))
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		return rec.Code
	}
	if status := post(idempotency.NewKey()); status != 200 {
		t.Fatalf("before: %d", status)
	}

	must(t, server.Pause())
	keys, start := make([]idempotency.Key, 1000), time.Now()
	var wg sync.WaitGroup
	for i := range keys {
		keys[i] = idempotency.NewKey()
		wg.Go(func() {
			if status := post(keys[i]); status != http.StatusServiceUnavailable {
				t.Errorf("hung: %d", status)
			}
		})
	}
	wg.Wait()
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("the last one waited %v", took)
	}
	must(t, server.Resume())
	for _, key := range keys {
		testenv.Eventually(t, func() error { // at once, or with the lease if the release was too late
			if status := post(key); status != 200 {
				return errors.New(http.StatusText(status))
			}
			return nil
		})
	}
	if n := runs.Load(); n != int64(len(keys))+1 {
		t.Errorf("%d runs of %d keys", n, len(keys)+1)
	}
}
