package flow_test

import (
	"errors"
	"fmt"
	"strconv"
	"testing"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Processes see what each other has told, in one order without a gap.
func TestSharedIsOfAllProcesses(t *testing.T) {
	t.Parallel()
	url := redistest.URL(t)
	one, other := flow.NewShared(redistest.Client(t, url)), flow.NewShared(redistest.Client(t, url))
	if counts, steps, err := one.Look(t.Context()); err != nil || len(counts)+len(steps) != 0 || steps == nil {
		t.Errorf("nothing was told: %v, %v, %v", counts, steps, err)
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

// What Redis does not take is told later.
func TestSharedOutlivesAnOutage(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis)
	shared := flow.NewShared(redistest.Client(t, server.URL()))
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		shared.Note(flow.Request, strconv.Itoa(i))
		if i == 20 {
			if err := shared.Tell(t.Context()); err == nil {
				t.Fatal("told to nobody")
			}
		}
	}
	if _, _, err := shared.Look(t.Context()); err == nil {
		t.Error("it tells what it cannot know")
	}
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, func() error { return shared.Tell(t.Context()) })
	counts, steps, err := shared.Look(t.Context())
	if err != nil || counts[flow.Request] != 50 || len(steps) != 40 || steps[0].Text != "10" || steps[39].Number != 50 {
		t.Error(fmt.Sprint(counts, " ", steps, " ", err))
	}
}

func TestNobodyShares(t *testing.T) {
	t.Parallel()
	var nobody *flow.Shared
	nobody.Note(flow.Request, "unseen")
}
