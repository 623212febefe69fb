package conformance

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

func testLongHandler(t *testing.T, store driver.Store) {
	probe := newClaim()
	lease := acquire(t, store, probe)
	var runs atomic.Int32
	entered := make(chan struct{})
	s := newService(t, store, idempotency.MiddlewareConfig{}, func(_ http.ResponseWriter, r *http.Request) {
		if runs.Add(1) == 1 {
			close(entered)
		}
		select {
		case <-time.After(2 * lease):
		case <-r.Context().Done():
			t.Errorf("handler cancelled: %v", context.Cause(r.Context()))
		}
	})
	key := idempotency.NewKey()
	done := make(chan reply)
	go func() { done <- s.post(key) }()
	<-entered
	for {
		select {
		case first := <-done:
			first.is(t, 200, "")
			s.post(key).is(t, 200, "")
			if runs.Load() != 1 {
				t.Errorf("%d runs", runs.Load())
			}
			return
		case <-time.After(lease / 5):
			if r := s.post(key); r.status != 409 && !r.replayed() {
				t.Errorf("second request got %d %s", r.status, r.body)
			}
		}
	}
}

func testLeaseLost(t *testing.T, store driver.Store) {
	s := newService(t, store, idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, r *http.Request) {
		claim, ok := driver.ClaimFrom(r.Context())
		if !ok {
			t.Error("no claim in the handler's context")
			return
		}
		must(t, "Release", store.Release(r.Context(), claim)) // as if the store had lost it
		select {
		case <-r.Context().Done():
			if cause := context.Cause(r.Context()); !errors.Is(cause, idempotency.ErrLeaseLost) {
				t.Errorf("cause %v; want ErrLeaseLost", cause)
			}
		case <-time.After(time.Minute):
			t.Error("handler not cancelled")
		}
	})
	s.post(idempotency.NewKey()).is(t, 503, "IDEMPOTENCY_STORE_UNAVAILABLE") // for a handler that wrote nothing
}
