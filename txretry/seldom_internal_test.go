package txretry

import (
	"testing"
	"testing/synctest"
	"time"
)

// A fault costs one line every ten seconds, which counts those that were left out.
func TestSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s seldom
		lines, skipped := 0, 0
		for range 300 { // 30 s
			if n, ok := s.due(); ok {
				lines++
				skipped += n
			}
			time.Sleep(100 * time.Millisecond)
		}
		if lines != 3 || skipped != 198 {
			t.Errorf("%d lines that skipped %d, want 3 and 198", lines, skipped)
		}
	})
}
