// Package conformance has the tests that every implementation of the contracts of idempotency/driver and
// idempotencypgx/driver must pass: [TestStore] for a Store, [TestMiddleware] for a store below the HTTP middleware,
// [TestRecords] and [TestDo] for Records.
package conformance

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/internal/breaker"
)

// TestStore tests a driver.Store.
func TestStore(t *testing.T, b Backend) {
	b.run(t, "a key is acquired once", testAcquiredOnce)
	b.run(t, "a completed key answers", testCompleted)
	b.run(t, "a tombstone answers", testTombstone)
	b.run(t, "completing keeps the claim's fingerprint", testFingerprintReplaced)
	b.run(t, "a released key is free", testReleased)
	b.run(t, "only the holder may change the record", testForeignToken)
	b.runAged(t, "an expired lease is taken over", testTakeover)
	b.runAged(t, "an expired lease completes nothing", testExpired)
	b.runAged(t, "an extended lease lives on", testExtend)
	b.runAged(t, "a repeated Begin renews the lease", testBeginRenews)
	b.runAged(t, "a record ends with its retention", testRetention)
	b.run(t, "scopes are apart", testScopes)
	b.run(t, "malformed keys are rejected", testMalformedKey)
	b.run(t, "a cancelled context begins nothing", testCancelled)
	b.run(t, "Look returns the state of a key", testLook)
	b.runAged(t, "Look at a key with an expired lease finds it free", testLookAtExpired)
	b.runAged(t, "Look at a key with an expired record finds it free", testLookAtFaded)
	b.run(t, "Look rejects malformed keys", testLookRefuses)
	b.run(t, "many rivals, one winner", testRivals)
	b.run(t, "two runs, in every order of their steps", func(t *testing.T, store driver.Store) {
		steps := 4
		if b.Bubble { // servers are slow, and the random sequences are longer
			steps = 5
		}
		testOrders(t, store, steps)
	})
}

func testAcquiredOnce(t *testing.T, store driver.Store) {
	c := newClaim()
	acquire(t, store, c)
	out := begin(t, store, rival(c))
	if out.State != driver.InProgress || out.Lease <= 0 || out.Lease > lease {
		t.Errorf("rival's Begin = %+v; want in progress with at most %v left", out, lease)
	}
	if out.Fingerprint != c.Fingerprint {
		t.Errorf("fingerprint = %+v, want the holder's %+v", out.Fingerprint, c.Fingerprint)
	}
	acquire(t, store, c)          // the same token again
	acquire(t, store, newClaim()) // another key
}

func testCompleted(t *testing.T, store driver.Store) {
	c := newClaim()
	acquire(t, store, c)
	want := driver.Response{
		Status: 201,
		Header: http.Header{
			"Link": {"</a>", `</b>; title="ü"`}, "X-Latin-1": {"caf\xe9"}, "Content-Disposition": {""},
			"Content-Type": nil, "etag": {`"1"`}, // net/http treats both differently from a missing header
		},
		Body: []byte("\x00\xff{\"a\": 1}\n\u2028"),
	}
	must(t, "Complete", store.Complete(t.Context(), c, want))
	other := want.Clone()
	other.Status, other.Body = 500, []byte("other")
	must(t, "Complete again", store.Complete(t.Context(), c, other))

	for _, claim := range []driver.Claim{c, rival(c)} {
		out := begin(t, store, claim)
		if out.State != driver.Completed || out.Fingerprint != c.Fingerprint {
			t.Fatalf("Begin = %+v; want completed with the fingerprint of the first", out)
		}
		sameResponse(t, out.Response, want)
	}
	for what, err := range map[string]error{
		"Extend":           store.Extend(t.Context(), c),
		"Release":          store.Release(t.Context(), c),
		"rival's Complete": store.Complete(t.Context(), rival(c), other),
	} {
		if !errors.Is(err, idempotency.ErrLeaseLost) {
			t.Errorf("%s of a completed key = %v; want ErrLeaseLost", what, err)
		}
	}
	sameResponse(t, begin(t, store, rival(c)).Response, want)
}

func sameResponse(t *testing.T, got, want driver.Response) {
	t.Helper()
	if got.Status != want.Status || !bytes.Equal(got.Body, want.Body) || len(got.Header) != len(want.Header) {
		t.Errorf("response = %+v, want %+v", got, want)
	}
	for name, values := range want.Header {
		if gotValues, there := got.Header[name]; !there || !slices.Equal(gotValues, values) {
			t.Errorf("header %s = %q, want %q", name, gotValues, values)
		}
	}
}

func testTombstone(t *testing.T, store driver.Store) {
	c := newClaim()
	acquire(t, store, c)
	must(t, "Complete", store.Complete(t.Context(), c, driver.Response{}))
	if out := begin(t, store, rival(c)); out.State != driver.Completed || !out.Response.Unavailable() {
		t.Errorf("Begin = %+v; want completed without a response", out)
	}
}

func testFingerprintReplaced(t *testing.T, store driver.Store) {
	c := newClaim()
	acquire(t, store, c)
	c.Fingerprint = driver.FingerprintOf("the record's fingerprint")
	must(t, "Complete", store.Complete(t.Context(), c, driver.Response{Status: 200}))
	if out := begin(t, store, rival(c)); out.Fingerprint != c.Fingerprint {
		t.Errorf("fingerprint = %+v, want %+v", out.Fingerprint, c.Fingerprint)
	}
}

func testReleased(t *testing.T, store driver.Store) {
	c := newClaim()
	acquire(t, store, c)
	must(t, "Release", store.Release(t.Context(), c))
	lost(t, store, c)
	next := rival(c)
	acquire(t, store, next)
	lost(t, store, c)
	must(t, "Complete", store.Complete(t.Context(), next, driver.Response{Status: 204}))
}

// lost checks that c can no longer change anything.
func lost(t *testing.T, store driver.Store, c driver.Claim) {
	t.Helper()
	for what, err := range map[string]error{
		"Extend":   store.Extend(t.Context(), c),
		"Complete": store.Complete(t.Context(), c, driver.Response{Status: 200, Body: []byte("too late")}),
		"Release":  store.Release(t.Context(), c),
	} {
		if !errors.Is(err, idempotency.ErrLeaseLost) {
			t.Errorf("%s without the lease = %v; want ErrLeaseLost", what, err)
		}
	}
}

func testForeignToken(t *testing.T, store driver.Store) {
	c := newClaim()
	lost(t, store, c) // before Begin
	acquire(t, store, c)
	lost(t, store, rival(c))
	must(t, "Extend", store.Extend(t.Context(), c))
	must(t, "Complete", store.Complete(t.Context(), c, driver.Response{Status: 200}))
}

func testTakeover(t *testing.T, store aged) {
	c := newClaim()
	next := rival(c)
	acquire(t, store, c)
	store.pass(c.Key, lease/2)
	if out := begin(t, store, next); out.State != driver.InProgress || out.Lease > lease/2 {
		t.Errorf("Begin after half the lease = %+v; want in progress", out)
	}
	store.pass(c.Key, lease/2)
	acquire(t, store, next)
	lost(t, store, c)
	must(t, "Complete", store.Complete(t.Context(), next, driver.Response{Status: 201}))
	lost(t, store, c)
	if out := begin(t, store, c); out.State != driver.Completed || out.Response.Status != 201 {
		t.Errorf("Begin = %+v; want the answer of the run that took over", out)
	}
}

func testExpired(t *testing.T, store aged) {
	c := newClaim()
	acquire(t, store, c)
	store.pass(c.Key, lease)
	lost(t, store, c)
	acquire(t, store, rival(c))
}

func testExtend(t *testing.T, store aged) {
	c := newClaim()
	acquire(t, store, c)
	for range 3 {
		store.pass(c.Key, lease/2)
		must(t, "Extend", store.Extend(t.Context(), c))
		if out := begin(t, store, rival(c)); out.State != driver.InProgress || out.Lease <= lease/2 {
			t.Fatalf("Begin = %+v; want in progress, with most of the lease left", out)
		}
	}
	must(t, "Complete", store.Complete(t.Context(), c, driver.Response{Status: 200}))
}

func testBeginRenews(t *testing.T, store aged) {
	c := newClaim()
	acquire(t, store, c)
	store.pass(c.Key, lease/2)
	acquire(t, store, c)
	if left := begin(t, store, rival(c)).Lease; left <= lease/2 {
		t.Errorf("%v left of a lease of %v that was renewed", left, lease)
	}
	must(t, "Complete", store.Complete(t.Context(), c, driver.Response{Status: 200}))
}

func testRetention(t *testing.T, store aged) {
	c := newClaim()
	acquire(t, store, c)
	must(t, "Complete", store.Complete(t.Context(), c, driver.Response{Status: 200}))
	store.pass(c.Key, retention-lease)
	if out := begin(t, store, rival(c)); out.State != driver.Completed {
		t.Errorf("Begin before the end of the record = %+v; want completed", out)
	}
	store.pass(c.Key, lease)
	lost(t, store, c) // a repeated Complete, too
	next := rival(c)
	acquire(t, store, next)
	lost(t, store, c)
	must(t, "Complete", store.Complete(t.Context(), next, driver.Response{Status: 201}))
}

func testScopes(t *testing.T, store driver.Store) {
	key := idempotency.NewKey()
	opaque, err := idempotency.ParseOpaque(`{lock}:@a\"` + string(key))
	must(t, "ParseOpaque", err)
	for _, k := range []idempotency.Key{
		opaque, opaque.In("a"),
		key, key.In("a"), key.In("b"), key.In("lock"), key.In("a:b"), key.In("{a}"), key.In("\x00 ü%41"),
		key.In(string(bytes.Repeat([]byte("long"), 1000))),
	} {
		acquire(t, store, driver.NewClaim(driver.Key(k), driver.FingerprintOf()))
	}
}

func testMalformedKey(t *testing.T, store driver.Store) {
	for _, key := range []idempotency.Key{"", "x", "{}", "@a:b", "@a", "@a:", "~", "~b", "@{:a0eebc999c0b4ef8bb6d6bb9bd380a11", "A0EEBC999C0B4EF8BB6D6BB9BD380A11"} {
		_, err := store.Begin(t.Context(), driver.NewClaim(driver.Key(key), driver.FingerprintOf()))
		if !errors.Is(err, idempotency.ErrKeyInvalid) {
			t.Errorf("Begin(%q) = %v; want ErrKeyInvalid", key, err)
		}
	}
}

func testCancelled(t *testing.T, store driver.Store) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := newClaim()
	if out, err := store.Begin(ctx, c); err == nil {
		t.Errorf("Begin = %+v with a cancelled context", out)
	}
	acquire(t, store, rival(c))
}

// beginAnswered repeats a Begin that a busy machine did not answer in time. If that Begin took the key, the claim
// takes it again.
func beginAnswered(store driver.Store, c driver.Claim) (out driver.BeginResult, err error) {
	for {
		out, err = store.Begin(background, c)
		if !errors.Is(err, breaker.ErrSilent) && !errors.Is(err, breaker.ErrDown) {
			return out, err
		}
	}
}

func testRivals(t *testing.T, store driver.Store) {
	const keys, rivals = 20, 16
	for range keys {
		c := newClaim()
		var won atomic.Int32
		var wg sync.WaitGroup
		for range rivals {
			wg.Go(func() {
				out, err := beginAnswered(store, rival(c))
				switch {
				case err != nil:
					t.Errorf("Begin: %v", err)
				case out.State == driver.Acquired:
					won.Add(1)
				case out.State != driver.InProgress:
					t.Errorf("Begin = %+v", out)
				}
			})
		}
		wg.Wait()
		if won.Load() != 1 {
			t.Fatalf("%d of %d acquired the key", won.Load(), rivals)
		}
	}
}

// The times of a store with the default configuration.
const (
	lease     = 30 * time.Second
	retention = 48 * time.Hour
)

// Backend makes the stores under test.
type Backend struct {
	// New returns an empty store with the default lease and retention.
	New func(t *testing.T) driver.Store
	// Pass lets d pass for a key of every store that New returns: the rest of the key's lease and record gets shorter
	// by d. nil is allowed with Bubble.
	Pass func(t *testing.T, key driver.Key, d time.Duration)
	// Bubble runs each test in a testing/synctest bubble. It is for stores whose leases use the clock of package time
	// and that need no network.
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

// aged is a store with a method that lets time pass.
type aged struct {
	driver.Store
	pass func(key driver.Key, d time.Duration)
}

// runAged runs fn as a subtest on an aged store.
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

// rival returns another run of the claim's key.
func rival(c driver.Claim) driver.Claim {
	return driver.NewClaim(c.Key, driver.FingerprintOf("another request"))
}

// acquire begins a claim that must be acquired, with a full lease.
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
		t.Skip("the store is no driver.Looker")
	}
	known, err := looker.Look(t.Context(), key)
	must(t, "Look", err)
	return known
}

// free checks that a key has no state.
func free(t *testing.T, store driver.Store, key driver.Key) {
	t.Helper()
	if known := look(t, store, key); known.State != 0 || known.Left != 0 || !known.Since.IsZero() || known.Fingerprint.Sum != "" || known.Response.Status != 0 {
		t.Errorf("Look at a free key = %+v", known)
	}
}

// clocks is the largest allowed difference between the store's clock and the test's clock.
const clocks = time.Minute

func testLook(t *testing.T, store driver.Store) {
	c := newClaim()
	free(t, store, c.Key)
	began := time.Now()
	acquire(t, store, c)
	known := look(t, store, c.Key)
	if known.State != driver.InProgress || known.Fingerprint != c.Fingerprint || known.Left <= 0 || known.Left > lease || known.Response.Status != 0 {
		t.Errorf("Look at a claimed key = %+v; want the claim's state, with at most %v left", known, lease)
	}
	if known.Since.Sub(began).Abs() > clocks {
		t.Errorf("claimed at %v; Look returns %v", began, known.Since)
	}
	free(t, store, driver.Key(idempotency.Key(c.Key).In("a scope")))
	must(t, "Extend", store.Extend(t.Context(), c)) // Look does not take the key

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
		t.Skip("the store is no driver.Looker")
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
