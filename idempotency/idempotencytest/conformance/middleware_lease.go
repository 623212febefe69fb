package conformance

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

func testLongHandler(t *testing.T, store driver.Store) {
	runs := 0
	s := newService(t, store, idempotency.MiddlewareConfig{}, func(_ http.ResponseWriter, r *http.Request) {
		runs++
		select {
		case <-time.After(2 * lease):
		case <-r.Context().Done():
			t.Errorf("handler cancelled: %v", context.Cause(r.Context()))
		}
	})
	key := idempotency.NewKey()
	done := make(chan reply)
	go func() { done <- s.post(key) }()
	for range 9 {
		time.Sleep(lease / 5)
		s.post(key).is(t, 409, "IDEMPOTENCY_KEY_IN_USE")
	}
	first := <-done
	first.is(t, 200, "")
	if again := s.post(key); !again.replayed() || runs != 1 {
		t.Errorf("again: %+v; %d runs", again, runs)
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
		<-r.Context().Done()
		if cause := context.Cause(r.Context()); !errors.Is(cause, idempotency.ErrLeaseLost) {
			t.Errorf("cause %v; want ErrLeaseLost", cause)
		}
	})
	s.post(idempotency.NewKey()).is(t, 503, "IDEMPOTENCY_STORE_UNAVAILABLE") // for a handler that wrote nothing
}
