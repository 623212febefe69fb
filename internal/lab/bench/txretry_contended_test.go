package main

import (
	"testing"
	"time"
)

func TestFairShare(t *testing.T) {
	t.Parallel()
	// Four callers of one row in a closed circle: each finds four, itself included, and waits four turns.
	one := make([]queue, 1)
	for range 4 {
		one[0].join()
	}
	var waits []time.Duration
	for range 5 {
		one[0].leave()
		one[0].join()
		waits = append(waits, 40*time.Millisecond)
	}
	one[0].joined.Store(5 * 4)
	if got := fairShare(waits, one); got != 40*time.Millisecond {
		t.Errorf("one row: %v, want 40ms", got)
	}

	// A second row with one caller, who waits one turn: the longest queue still decides.
	two := make([]queue, 2)
	two[0].joined.Store(4)
	two[0].longest.Store(4)
	two[1].join()
	if got := fairShare([]time.Duration{40 * time.Millisecond, 10 * time.Millisecond}, two); got != 40*time.Millisecond {
		t.Errorf("two rows: %v, want 40ms", got)
	}
}
