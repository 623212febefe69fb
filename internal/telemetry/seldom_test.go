package telemetry_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/telemetry"
)

func TestSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s telemetry.Seldom
		var lines []int
		for range 250 { // 25 seconds
			if skipped, ok := s.Due(); ok {
				lines = append(lines, skipped)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if want := []int{0, 99, 99}; !slices.Equal(lines, want) {
			t.Errorf("logged with %v left out, want %v", lines, want)
		}
	})
}
