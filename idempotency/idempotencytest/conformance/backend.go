package conformance

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// Backend makes the stores under test.
type Backend struct {
	// New returns an empty store whose leases outlast any pause of a loaded
	// machine; the default of 30 s is right.
	New func(t *testing.T) driver.Store
	// Brief returns an empty store for the tests that wait for leases to run
	// out: let them be a few seconds. nil: New, which is right with Bubble.
	Brief func(t *testing.T) driver.Store
	// Fading returns an empty store and how long its completed records last: let
	// that and its leases be a few seconds. With Bubble they may be long.
	Fading func(t *testing.T) (store driver.Store, retention time.Duration)
	// Bubble runs each test in a testing/synctest bubble. For stores whose
	// leases are on the clock of package time, and that need no network.
	Bubble bool
}

// run runs fn as a subtest on a fresh store.
func (b Backend) run(t *testing.T, name string, fn func(t *testing.T, store driver.Store)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		inBubble(t, b.Bubble, func(t *testing.T) { fn(t, b.New(t)) })
	})
}

func inBubble(t *testing.T, bubble bool, fn func(t *testing.T)) {
	if bubble {
		synctest.Test(t, fn)
		return
	}
	fn(t)
}

// runFading is run on a store whose records can be waited for.
func (b Backend) runFading(t *testing.T, name string, fn func(t *testing.T, store driver.Store, retention time.Duration)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		inBubble(t, b.Bubble, func(t *testing.T) {
			store, retention := b.Fading(t)
			fn(t, store, retention)
		})
	})
}

// runBrief is run on a store whose leases can be waited for.
func (b Backend) runBrief(t *testing.T, name string, fn func(t *testing.T, store driver.Store)) {
	t.Helper()
	if b.Brief != nil {
		b.New = b.Brief
	}
	b.run(t, name, fn)
}

// until polls check until it is true, and fails the test after the patience.
func until(t *testing.T, patience time.Duration, what string, check func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !check() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
		<-time.After(10 * time.Millisecond)
	}
}

func newClaim() driver.Claim {
	return driver.NewClaim(driver.Key(idempotency.NewKey()), driver.FingerprintOf("request"))
}

// rival is another run of the claim's key.
func rival(c driver.Claim) driver.Claim {
	return driver.NewClaim(c.Key, driver.FingerprintOf("another request"))
}

// acquire begins a claim that must be acquired, and returns its lease.
func acquire(t *testing.T, store driver.Store, c driver.Claim) time.Duration {
	t.Helper()
	out, err := store.Begin(t.Context(), c)
	if err != nil || out.State != driver.Acquired || out.Lease <= 0 {
		t.Fatalf("Begin = %+v, %v; want acquired with a lease", out, err)
	}
	return out.Lease
}

func begin(t *testing.T, store driver.Store, c driver.Claim) driver.BeginResult {
	t.Helper()
	out, err := store.Begin(t.Context(), c)
	if err != nil {
		t.Fatalf("Begin: %v", err)
	}
	return out
}

func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

var background = context.Background()
