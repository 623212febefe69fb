package telemetry_test

import (
	"slices"
	"strconv"
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

func TestSeldomEach(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s telemetry.SeldomEach
		lines := map[string]int{}
		for n := range 3000 { // 15 seconds
			for _, kind := range []string{"steady", "kind " + strconv.Itoa(n)} {
				if _, ok := s.Due(kind); ok {
					lines[kind]++
				}
			}
			time.Sleep(5 * time.Millisecond)
		}
		if lines["steady"] != 2 {
			t.Errorf("%d lines of one kind, want 2", lines["steady"])
		}
		if n := len(lines); n < 1000 || n > 1010 {
			t.Errorf("lines of %d kinds, want a thousand and a few for all others", n)
		}
	})
}
