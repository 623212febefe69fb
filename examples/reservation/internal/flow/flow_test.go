package flow_test

import (
	"strconv"
	"testing"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
)

func TestOnlyTheLastStepsAreKept(t *testing.T) {
	t.Parallel()
	tracker := flow.New()
	for i := range 100 {
		tracker.Note(flow.Request, strconv.Itoa(i))
	}
	tracker.Note(flow.Updated, "last")
	counts, steps, _ := tracker.Look(t.Context())
	if counts[flow.Request] != 100 || counts[flow.Updated] != 1 {
		t.Errorf("counts %v", counts)
	}
	if len(steps) != 40 || steps[0].Number != 62 || steps[39].Text != "last" {
		t.Errorf("%d steps, from %v to %v", len(steps), steps[0], steps[len(steps)-1])
	}
}

func TestNobodyCounts(t *testing.T) {
	t.Parallel()
	var nobody *flow.Tracker
	nobody.Note(flow.Request, "unseen")
	if counts, steps, _ := nobody.Look(t.Context()); len(counts)+len(steps) != 0 {
		t.Errorf("%v %v", counts, steps)
	}
}
