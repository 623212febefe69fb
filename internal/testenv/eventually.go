package testenv

import (
	"testing"
	"time"
)

// Patience is how long a test waits for something that must happen. It detects a hang and measures nothing:
// a test that asserts a time runs in a bubble of testing/synctest, or at night.
const Patience = 60 * time.Second

// Eventually calls check every 20 ms until it returns nil. It ends the test with the last error after Patience.
func Eventually(t testing.TB, check func() error) {
	t.Helper()
	deadline := time.Now().Add(Patience)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still failing after %v: %v", Patience, err)
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
