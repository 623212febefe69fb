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

// bare returns the store under test itself.
func bare(store driver.Store) driver.Store {
	if s, ok := store.(aged); ok {
		return s.Store
	}
	return store
}

func look(t *testing.T, store driver.Store, key driver.Key) driver.Known {
	t.Helper()
	looker, ok := bare(store).(driver.Looker)
	if !ok {
		t.Skip("the store does not tell")
	}
	known, err := looker.Look(t.Context(), key)
	must(t, "Look", err)
	return known
}

// free checks that nothing is known of a key.
func free(t *testing.T, store driver.Store, key driver.Key) {
	t.Helper()
	if known := look(t, store, key); known.State != 0 || known.Left != 0 || !known.Since.IsZero() || known.Fingerprint.Sum != "" || known.Response.Status != 0 {
		t.Errorf("Look at a free key = %+v", known)
	}
}

// clocks is how far the store's clock may be from that of the test.
const clocks = time.Minute

func testLook(t *testing.T, store driver.Store) {
	c := newClaim()
	free(t, store, c.Key)
	began := time.Now()
	acquire(t, store, c)
	known := look(t, store, c.Key)
	if known.State != driver.InProgress || known.Fingerprint != c.Fingerprint || known.Left <= 0 || known.Left > lease || known.Response.Status != 0 {
		t.Errorf("Look at a claimed key = %+v; want what the claim says, with at most %v left", known, lease)
	}
	if known.Since.Sub(began).Abs() > clocks {
		t.Errorf("claimed at %v, says Look at %v", began, known.Since)
	}
	free(t, store, driver.Key(idempotency.Key(c.Key).In("a scope")))
	must(t, "Extend", store.Extend(t.Context(), c)) // a look takes nothing

	want := driver.Response{Status: 201, Header: http.Header{"Location": {"/1"}}, Body: []byte("{}")}
	must(t, "Complete", store.Complete(t.Context(), c, want))
	done := look(t, store, c.Key)
	if done.State != driver.Completed || done.Fingerprint != c.Fingerprint || done.Left <= 0 || !done.Since.Equal(known.Since) {
		t.Errorf("Look at a completed key = %+v; want it completed, since %v", done, known.Since)
	}
	sameResponse(t, done.Response, want)

	other := newClaim()
	acquire(t, store, other)
	must(t, "Release", store.Release(t.Context(), other))
	free(t, store, other.Key)
}

func testLookAtExpired(t *testing.T, store aged) {
	c := newClaim()
	acquire(t, store, c)
	store.pass(c.Key, lease)
	free(t, store, c.Key)
	acquire(t, store, rival(c))
}

func testLookAtFaded(t *testing.T, store aged) {
	c := newClaim()
	acquire(t, store, c)
	must(t, "Complete", store.Complete(t.Context(), c, driver.Response{Status: 200}))
	if known := look(t, store, c.Key); known.Left <= retention-lease || known.Left > retention {
		t.Errorf("%v are left of a retention of %v", known.Left, retention)
	}
	store.pass(c.Key, retention)
	free(t, store, c.Key)
}

func testLookRefuses(t *testing.T, store driver.Store) {
	looker, ok := store.(driver.Looker)
	if !ok {
		t.Skip("the store does not tell")
	}
	if known, err := looker.Look(t.Context(), "x"); !errors.Is(err, driver.ErrKeyInvalid) {
		t.Errorf("Look at a malformed key = %+v, %v; want ErrKeyInvalid", known, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if known, err := looker.Look(ctx, newClaim().Key); err == nil {
		t.Errorf("Look = %+v with a cancelled context", known)
	}
}
