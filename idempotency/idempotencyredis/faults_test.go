package idempotencyredis_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// deaf is a connection that loses the next answer, when told to, and breaks.
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

// The client sends a script again when its answer is lost.
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
	begin(t, s, first) // it has a connection now, and the server knows the script

	loses()
	if out := begin(t, s, first); out.State != driver.Acquired {
		t.Errorf("Begin = %+v", out)
	}
	loses()
	if err := s.Extend(t.Context(), first); err != nil {
		t.Errorf("Extend = %v", err)
	}
	loses()
	// It was free already, unless what was lost said that the server had to be taught.
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

// A server that hangs holds nobody longer than the timeout, and the keys of those
// who gave up become free when it comes back.
func TestHungServer(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it stops a server under 1,000 requests, and asserts a time")
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
		testenv.Eventually(t, func() error { // at once, or with the lease if the release was late too
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
