// Package conformance is the suite that every writer, source and publisher of
// an outbox passes, the fakes and the real ones alike. Run it on your own
// implementations:
//
//	func TestSource(t *testing.T) {
//		conformance.TestWriter(t, conformance.Backend{Open: open})
//		conformance.TestSource(t, conformance.Backend{Open: open})
//		conformance.TestDeadLetters(t, conformance.Backend{Open: open})
//	}
package conformance

import (
	"testing"
	"testing/synctest"
	"time"
)

// patience detects a hang.
const patience = time.Minute

// Delays of messages: until after the test, and until a moment later.
const (
	long  = time.Hour
	short = 50 * time.Millisecond
)

// each runs one case as a parallel subtest, in a bubble where bubble says so.
func each(t *testing.T, bubble bool, name string, fn func(t *testing.T)) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		if bubble {
			synctest.Test(t, fn)
			return
		}
		fn(t)
	})
}

// eventually polls until check returns "" and fails with what it said last.
func eventually(t *testing.T, check func() string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v still: %s", patience, problem)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
