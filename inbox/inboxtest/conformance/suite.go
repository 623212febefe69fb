// Package conformance holds the suites that every processor of messages, store of dedup entries,
// ledger, parking, transport and consumer must pass, those of this module and those of others:
// TestProcessor, TestEntries, TestLedger, TestParking, TestSource and TestConsumer.
package conformance

import (
	"testing"
	"testing/synctest"
	"time"
)

// Runs says which subtests of a suite run on a backend.
type Runs struct {
	// Bubble runs each subtest in a testing/synctest bubble.
	Bubble bool
	// Nightly skips a subtest that does not run with every change, as testenv.Nightly does. Without it
	// all subtests run, which is for fakes.
	Nightly func(t testing.TB, why string)
	// Variant says that the suite runs on another backend of the same transport. Only the subtests that
	// depend on the kind of queue run with every change.
	Variant bool
}

// tier says when a subtest runs on a server.
type tier int

const (
	always tier = iota // with every change, on each backend
	once               // with every change, on one backend of a transport
	fakes              // with every change on fakes; on servers at night, since it is about the engine or about silence
)

// subtest is a test of a suite.
type subtest[F any] struct {
	tier tier
	test func(*testing.T, F)
}

// runAll runs the subtests, each with a fresh fixture.
func runAll[F any](t *testing.T, r Runs, fixture func(*testing.T) F, tests map[string]subtest[F]) {
	for name, s := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			switch {
			case r.Nightly == nil:
			case s.tier == fakes:
				r.Nightly(t, "fakes run it with every change")
			case s.tier == once && r.Variant:
				r.Nightly(t, "another kind of queue runs it with every change")
			}
			if r.Bubble {
				synctest.Test(t, func(t *testing.T) { s.test(t, fixture(t)) })
				return
			}
			s.test(t, fixture(t))
		})
	}
}

// patience bounds the wait for something that must happen. It detects hangs, as testenv.Patience does.
const patience = time.Minute

// await polls until check returns nil.
func await(t *testing.T, check func() error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still failing after %v: %v", patience, err)
		}
	}
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
