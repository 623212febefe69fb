package main

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/load"
)

func TestSharesAreWhole(t *testing.T) {
	t.Parallel()
	b := &bench{}
	end := b.observe()
	for used := load.CPUTime(); load.CPUTime()-used < 300*time.Millisecond; { // by this test or one beside it
	}
	end()
	sum := 0.0
	for user, percent := range b.used {
		if percent < 0 {
			t.Errorf("%s: %v %%", userNames[user], percent)
		}
		sum += percent
	}
	if math.Abs(sum-100) > 10 || b.used[ofBench] <= 0 {
		t.Errorf("%v adds up to %v %%, of which this process has %v %%; want about 100, and something", b.used, sum, b.used[ofBench])
	}
}

func TestSharesInReport(t *testing.T) {
	t.Parallel()
	r := measuredReport(t, "messages/s", 80, 90, 85)
	r.Tables[0].Rows[0].Used = []spread{exactly(12), exactly(34), exactly(0), exactly(math.NaN()), exactly(4), exactly(50)}
	r.Tables[0].Rows[2].Used = r.Tables[0].Rows[0].Used
	r.Tables[0].Rows[2].Layers = []float64{11, 22, 33, 4, 25, 5}
	text := r.markdown("x")
	for _, want := range []string{
		"| a table <of> figures | publish alone | 12 | 34 | 0 | - | 4 | 50 | - | - | - | - | - | - |\n",
		"| a table <of> figures | holdfast | 12 | 34 | 0 | - | 4 | 50 | 11 | 22 | 33 | 4 | 25 | 5 |\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
}
