package suite

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
)

// losing is a store that loses every claim at once.
type losing struct{ driver.Store }

func (s losing) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	out, err := s.Store.Begin(ctx, claim)
	out.Lease = min(out.Lease, 30*time.Millisecond)
	return out, err
}

func (losing) Extend(context.Context, driver.Claim) error  { return driver.ErrLeaseLost }
func (losing) Release(context.Context, driver.Claim) error { return driver.ErrLeaseLost }

func testLeaseLost(t *testing.T, o once) {
	o.store = losing{o.store}
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(ctx context.Context, _ *shopv1.PlaceOrderRequest, _ Set) (*shopv1.Order, error) {
		select {
		case <-ctx.Done():
			if cause := context.Cause(ctx); !errors.Is(cause, idempotency.ErrLeaseLost) {
				t.Errorf("cause %v; want ErrLeaseLost", cause)
			}
		case <-time.After(Patience):
			t.Error("handler not cancelled")
		}
		return nil, ctx.Err()
	})
	r := c.Place(t.Context(), Ask{Keys: newKey()})
	r.is(t, codes.Unavailable, "IDEMPOTENCY_STORE_UNAVAILABLE")
	r.waits(t)
}

func testClientGone(t *testing.T, o once) {
	var runs atomic.Int64
	ctx, hangUp := context.WithCancel(t.Context())
	gone := make(chan struct{})
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(ctx context.Context, req *shopv1.PlaceOrderRequest, set Set) (*shopv1.Order, error) {
		hangUp()
		<-gone
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		return counted(&runs)(ctx, req, set)
	})
	ask := Ask{Keys: newKey()}
	c.Place(ctx, ask).is(t, codes.Canceled, "")
	close(gone)
	deadline := time.Now().Add(Patience)
	for {
		again := c.Place(t.Context(), ask)
		if again.code() == codes.OK {
			if again.Order.GetId() != "order 1" || !again.replayed() {
				t.Errorf("after the client hung up: %v", again)
			}
			return
		}
		if again.is(t, codes.Aborted, "IDEMPOTENCY_KEY_IN_USE"); time.Now().After(deadline) || t.Failed() {
			t.Fatal("the answer was not kept")
		}
	}
}

func testStampede(t *testing.T, o once) {
	const keys, clients, retries = 20, 32, 5
	var runs atomic.Int64
	c := o.serve(t, idempotency.MiddlewareConfig{}, counted(&runs))
	for n, left := 0, retries; n < keys; {
		ask, before := Ask{Keys: newKey()}, runs.Load()
		var fresh, unavailable atomic.Int64
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() {
				r := c.Place(t.Context(), ask)
				switch {
				case r.code() == codes.Aborted:
				case r.code() == codes.Unavailable:
					unavailable.Add(1)
				case r.Order.GetId() != fmt.Sprint("order ", before+1):
					t.Errorf("got %v", r)
				case !r.replayed():
					fresh.Add(1)
				}
			})
		}
		wg.Wait()
		if unavailable.Load() > 0 && left > 0 { // the machine has stalled: another key is tried
			left--
			continue
		}
		if made := runs.Load() - before; made != 1 || fresh.Load() != 1 || unavailable.Load() > 0 {
			t.Fatalf("key %d: %d runs, %d fresh answers, %d times unavailable", n+1, made, fresh.Load(), unavailable.Load())
		}
		n, left = n+1, retries
	}
}

// down is a store that does not answer.
type down struct{ driver.Store }

func (down) Begin(context.Context, driver.Claim) (driver.BeginResult, error) {
	return driver.BeginResult{}, errors.New("connection refused")
}

func testStoreDown(t *testing.T, o once) {
	var runs atomic.Int64
	o.store = down{o.store}
	r := o.serve(t, idempotency.MiddlewareConfig{}, counted(&runs)).Place(t.Context(), Ask{Keys: newKey()})
	r.is(t, codes.Unavailable, "IDEMPOTENCY_STORE_UNAVAILABLE")
	if r.waits(t); runs.Load() != 0 || strings.Contains(r.Status.String(), "refused") {
		t.Errorf("%v after %d runs", r.Status, runs.Load())
	}
	open := idempotency.MiddlewareConfig{FailOpen: func(r *http.Request) bool { return r.URL.Path == shopv1.Shop_PlaceOrder_FullMethodName }}
	r = o.serve(t, open, counted(&runs)).Place(t.Context(), Ask{Keys: newKey()})
	if r.is(t, codes.OK, ""); r.Header.Get("Idempotency-Bypassed") != "true" || runs.Load() != 1 {
		t.Errorf("%v after %d runs", r, runs.Load())
	}
}

func testScopeFails(t *testing.T, o once) {
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(context.Context, *shopv1.PlaceOrderRequest, Set) (*shopv1.Order, error) {
		t.Error("the handler ran")
		return nil, nil
	})
	c.Place(t.Context(), Ask{Keys: newKey(), User: "nobody"}).is(t, codes.Internal, "INTERNAL")
}

// TestTakeover tests what becomes of the key of a process that died.
func TestTakeover(t *testing.T, start Protocol) {
	const lease = 2 * time.Second
	for name, store := range Stores(t, lease) {
		if name == "memory" { // which dies with its process
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var runs atomic.Int64
			c := start(t, Setup{Store: store, Place: counted(&runs)})
			ask, begun := Ask{Keys: newKey()}, time.Now()
			claim := driver.NewClaim(driver.Key(idempotency.Key(ask.Keys[0]).In("ann")), driver.Fingerprint{})
			if out, err := store.Begin(t.Context(), claim); err != nil || out.State != driver.Acquired {
				t.Fatal(out, err)
			}
			busy := c.Place(t.Context(), ask)
			if time.Since(begun) < lease { // timing: a slow call finds the lease over
				busy.is(t, codes.Aborted, "IDEMPOTENCY_KEY_IN_USE")
			}
			for busy.code() == codes.Aborted && time.Since(begun) < Patience {
				retry, _ := detail[*errdetails.RetryInfo](busy)
				time.Sleep(min(retry.GetRetryDelay().AsDuration(), lease)) // timing: waits until the lease is over
				busy = c.Place(t.Context(), ask)
			}
			if busy.Order.GetId() != "order 1" || busy.replayed() {
				t.Errorf("after %v: %v", time.Since(begun), busy)
			}
			if again := c.Place(t.Context(), ask); again.Order.GetId() != "order 1" || !again.replayed() {
				t.Errorf("again: %v", again)
			}
		})
	}
}
