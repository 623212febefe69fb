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
