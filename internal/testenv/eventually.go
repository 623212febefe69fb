package testenv

import (
	"testing"
	"time"
)

// Patience is how long a test waits for what must happen. It measures nothing: a calm machine
// needs a small part of it, and a busy one must not fail the test.
const Patience = 5 * time.Minute

// Eventually calls check every 20 ms until it returns nil, and ends the test
// with the last error when that takes longer than timeout.
func Eventually(t testing.TB, timeout time.Duration, check func() error) {
	t.Helper()
	deadline := time.Now().Add(timeout)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still failing after %v: %v", timeout, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// InTime plays a scenario that returns how long it took, and promises at most limit. A busy machine may be late,
// so the test fails only if three tries in a row are.
func InTime(t testing.TB, limit time.Duration, play func() time.Duration) {
	t.Helper()
	var took []time.Duration
	for range 3 {
		took = append(took, play())
		if took[len(took)-1] <= limit {
			return
		}
	}
	t.Errorf("took %v, want at most %v", took, limit)
}
