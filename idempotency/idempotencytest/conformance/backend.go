package conformance

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// The times of a store with the default configuration.
const (
	lease     = 30 * time.Second
	retention = 48 * time.Hour
)

// Backend makes the stores under test.
type Backend struct {
	// New returns an empty store with the default lease and retention.
	New func(t *testing.T) driver.Store
	// Pass makes d pass for a key of every store that New returns: what is left of the key's lease and record
	// gets shorter by d. nil is right with Bubble.
	Pass func(t *testing.T, key driver.Key, d time.Duration)
	// Bubble runs each test in a testing/synctest bubble. It is for stores whose leases are on the clock of
	// package time, and that need no network.
	Bubble bool
}

// run runs fn as a subtest on a new store.
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

// aged is a store for whose keys time passes.
type aged struct {
	driver.Store
	pass func(key driver.Key, d time.Duration)
}

// runAged runs fn as a subtest on a store for whose keys time passes.
func (b Backend) runAged(t *testing.T, name string, fn func(t *testing.T, store aged)) {
	t.Helper()
	b.run(t, name, func(t *testing.T, store driver.Store) {
		fn(t, aged{store, func(key driver.Key, d time.Duration) {
			if b.Pass == nil {
				time.Sleep(d) // timing: in a bubble
				return
			}
			b.Pass(t, key, d)
		}})
	})
}

func newClaim() driver.Claim {
	return driver.NewClaim(driver.Key(idempotency.NewKey()), driver.FingerprintOf("request"))
}

// rival is another run of the claim's key.
func rival(c driver.Claim) driver.Claim {
	return driver.NewClaim(c.Key, driver.FingerprintOf("another request"))
}

// acquire begins a claim that must be acquired, with a whole lease.
func acquire(t *testing.T, store driver.Store, c driver.Claim) {
	t.Helper()
	if out := begin(t, store, c); out.State != driver.Acquired || out.Lease != lease {
		t.Fatalf("Begin = %+v; want acquired with a lease of %v", out, lease)
	}
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
