package inboxnats

import (
	"testing"
	"time"
)

// A host whose clock is late by any time waits for the delay at most twice. Other hosts wait once.
func TestDue_waitsAtMostTwice(t *testing.T) {
	t.Parallel()
	const delay = 4 * time.Second
	for late, want := range map[time.Duration]time.Duration{
		0: delay, time.Second: delay + time.Second, delay: 2 * delay, time.Hour: delay, -time.Second: delay - time.Second, -time.Hour: 0,
	} {
		passed := time.Duration(0)
		for deliveries := 1; ; deliveries++ {
			wait := due("4000", passed-late, deliveries > 1)
			if wait <= 0 {
				break
			}
			passed += wait
			if deliveries > 10 {
				break
			}
		}
		if passed != want {
			t.Errorf("a clock that is late by %v: the retry waits %v, want %v", late, passed, want)
		}
	}
}
