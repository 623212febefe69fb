package flow_test

import (
	"errors"
	"os"
	"strconv"
	"testing"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

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

func TestTracker_nilCountsNothing(t *testing.T) {
	t.Parallel()
	var nobody *flow.Tracker
	nobody.Note(flow.Request, "unseen")
	(*flow.Shared)(nil).Note(flow.Request, "unseen")
	if counts, steps, _ := nobody.Look(t.Context()); len(counts)+len(steps) != 0 {
		t.Errorf("%v %v", counts, steps)
	}
}

// Processes see each other's notes, in one order without a gap.
func TestSharedIsOfAllProcesses(t *testing.T) {
	t.Parallel()
	url := redistest.URL(t)
	one, other := flow.NewShared(redistest.Client(t, url)), flow.NewShared(redistest.Client(t, url))
	if counts, steps, err := one.Look(t.Context()); err != nil || len(counts)+len(steps) != 0 || steps == nil {
		t.Errorf("before any note: %v, %v, %v", counts, steps, err)
	}
	for i := range 30 {
		one.Note(flow.Request, strconv.Itoa(i))
		other.Note(flow.Published, strconv.Itoa(i))
	}
	if err := errors.Join(one.Tell(t.Context()), other.Tell(t.Context()), other.Tell(t.Context())); err != nil {
		t.Fatal(err)
	}
	one.Note(flow.Updated, "last")
	if err := one.Tell(t.Context()); err != nil {
		t.Fatal(err)
	}
	counts, steps, err := other.Look(t.Context())
	if err != nil || counts[flow.Request] != 30 || counts[flow.Published] != 30 || counts[flow.Updated] != 1 {
		t.Errorf("%v, %v", counts, err)
	}
	if len(steps) != 40 || steps[0].Number != 22 || steps[39].Number != 61 || steps[39].Text != "last" || steps[0].At.IsZero() {
		t.Errorf("%d steps: %+v", len(steps), steps)
	}
}
