package sim_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/provenance"
	"github.com/holdfast-go/holdfast/internal/lab/sim"
)

var pairs = flag.Bool("pairs", false, "TestEnumerated also runs every pair of faults, which takes minutes")

// TestEnumerated runs all schedules with at most one fault, or with at most two, in one child process per processor.
func TestEnumerated(t *testing.T) {
	if isShuffled() {
		t.Skip("no schedule repeats under the race detector, which shuffles goroutines")
	}
	began := time.Now()
	head := provenance.Head("make pairs", began)
	var all enumeration
	var children sync.WaitGroup
	for i := range runtime.NumCPU() {
		children.Go(func() { all.child(t, i, runtime.NumCPU()) })
	}
	children.Wait()
	all.report(t, head, time.Since(began)) // timing: it is printed
}

func isShuffled() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// enumeratedEnv makes a process a child of TestEnumerated: it has the child's number and the number of children.
const enumeratedEnv = "HOLDFAST_SIM_ENUMERATED"

// progress is a message of a child: a schedule starts, or has ended.
type progress struct {
	Begins string `json:",omitempty"` // its faults
	Ended  *ended `json:",omitempty"`
}

// ended is a schedule that was run.
type ended struct {
	Faults  []sim.Fault // in their order
	Points  []sim.Point // of the schedule without faults
	Later   int         // of a schedule with one fault: the faults at later points
	Bad     string      // its faults and findings; empty if all is well
	Strayed bool        // no run reached the last fault as expected
}

func TestEnumeratedChild(t *testing.T) {
	var number, children int
	if _, err := fmt.Sscan(os.Getenv(enumeratedEnv), &number, &children); err != nil {
		return // not a child
	}
	out := json.NewEncoder(os.Stdout)
	tell := func(p progress) {
		if err := out.Encode(p); err != nil {
			t.Fatal(err)
		}
	}
	run := func(before sim.Enumerated, faults ...sim.Fault) sim.Enumerated {
		tell(progress{Begins: text(faults)})
		r, ok := repeated(t, before, faults)
		e := &ended{Faults: faults, Strayed: !ok}
		switch {
		case !ok:
			r.Points = nil
		case len(faults) == 0:
			e.Points = r.Points
		case len(faults) == 1:
			e.Later = len(faultsOf(after(r.Points, faults[0])))
		}
		if len(r.Findings) > 0 {
			e.Bad = text(faults) + "\n" + list(r.Findings)
		}
		tell(progress{Ended: e})
		return r
	}
	calm := run(sim.Enumerated{})
	singles := faultsOf(calm.Points)
	results := make([]sim.Enumerated, len(singles))
	for i := number; i < len(singles); i += children {
		results[i] = run(calm, singles[i])
	}
	for i := number; i < len(singles) && *pairs; i += children {
		for _, second := range faultsOf(after(results[i].Points, singles[i])) {
			run(results[i], singles[i], second)
		}
	}
}

// faultsOf returns all faults at these points.
func faultsOf(points []sim.Point) (faults []sim.Fault) {
	for _, p := range points {
		faults = append(faults, p.Faults()...)
	}
	return faults
}

// after returns the points behind a fault.
func after(points []sim.Point, f sim.Fault) []sim.Point {
	return points[slices.Index(points, f.Point)+1:]
}

// maxRuns is how often a schedule is run until it repeats. On a busy machine the Go scheduler may preempt a goroutine.
const maxRuns = 20

// repeated runs a schedule until it is the same, up to its last fault, as the schedule before, which has no such fault.
func repeated(t *testing.T, before sim.Enumerated, faults []sim.Fault) (r sim.Enumerated, ok bool) {
	for range maxRuns {
		r = sim.Enumerate(t, faults)
		if len(faults) == 0 {
			return r, true
		}
		same := slices.Index(before.Points, faults[len(faults)-1].Point) + 1
		if r.Fired == len(faults) && len(r.Points) >= same && slices.Equal(r.Points[:same], before.Points[:same]) {
			return r, true
		}
	}
	return r, false
}

// text names the faults of a schedule.
func text(faults []sim.Fault) string {
	if len(faults) == 0 {
		return "no fault"
	}
	var names []string
	for _, f := range faults {
		names = append(names, f.String())
	}
	return strings.Join(names, ", then ")
}

// enumeration collects the messages of all children.
type enumeration struct {
	mu      sync.Mutex
	points  []sim.Point    // of the schedule without faults
	singles int            // schedules with one fault
	listed  int            // schedules with two faults that these list
	first   map[string]int // schedules with one fault, by its step
	second  map[string]int // schedules with two faults, by the step of the second
	bad     []string
	strayed []string
}

// child runs a child to its end.
func (e *enumeration) child(t *testing.T, number, children int) {
	running := ""
	said, err := child(t, fmt.Sprintf("%s=%d %d", enumeratedEnv, number, children), "-test.run=^TestEnumeratedChild$", func(text []byte) (known, enough bool) {
		var p progress
		if json.Unmarshal(text, &p) != nil {
			return false, false
		}
		running = p.Begins
		return true, p.Ended != nil && e.add(t, *p.Ended)
	}, fmt.Sprintf("-pairs=%v", *pairs))
	switch {
	case err == nil:
	case running != "":
		e.mu.Lock()
		defer e.mu.Unlock()
		e.bad = append(e.bad, fmt.Sprintf("found after %d schedules: %s\n%v\n%s", e.run(), running, err, said))
	default:
		t.Errorf("a child failed between two schedules: %v\n%s", err, said)
	}
}

// add counts a schedule, and reports whether there are enough bad ones.
func (e *enumeration) add(t *testing.T, one ended) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch len(one.Faults) {
	case 0: // which each child runs
		if e.points == nil {
			e.first, e.second = map[string]int{}, map[string]int{}
			e.points, e.singles = one.Points, len(faultsOf(one.Points))
		} else if !slices.Equal(one.Points, e.points) {
			t.Error("the schedule without faults differs from process to process")
		}
	case 1:
		e.first[one.Faults[0].Step]++
		e.listed += one.Later
	case 2:
		e.second[one.Faults[1].Step]++
	}
	if one.Strayed {
		e.strayed = append(e.strayed, text(one.Faults))
	}
	if one.Bad != "" {
		e.bad = append(e.bad, fmt.Sprintf("found after %d schedules: %s", e.run(), one.Bad))
	}
	return len(e.bad) >= *most
}

// run returns the number of schedules that were run.
func (e *enumeration) run() int { return 1 + sum(e.first) + sum(e.second) }

func (e *enumeration) report(t *testing.T, head string, took time.Duration) {
	publish(t, e.text(head, took))
	for _, bad := range e.bad {
		t.Error(bad)
	}
	for _, strayed := range e.strayed {
		t.Errorf("did not repeat: %s", strayed)
	}
	if n := e.run(); len(e.bad) == 0 && n != e.all() {
		t.Errorf("%d schedules were run, want %d", n, e.all())
	}
}

// all returns the number of schedules that were to be run.
func (e *enumeration) all() int {
	if *pairs {
		return 1 + e.singles + e.listed
	}
	return 1 + e.singles
}

func sum(counts map[string]int) (n int) {
	for _, one := range counts {
		n += one
	}
	return n
}

// text returns the report as Markdown.
func (e *enumeration) text(head string, took time.Duration) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Enumerated schedules\n\n%s\n\n", head)
	fmt.Fprintf(&b, "One buyer, one process that serves, two relays, two consumers. %d of %d schedules were run, %d bad, in %v on %d processors.\n\n",
		e.run()-len(e.strayed), e.all(), len(e.bad), took.Round(time.Second), runtime.NumCPU())
	fmt.Fprintf(&b, "N = 1 + S + P = 1 + %d + %d. S is the number of faults at the %d points of the schedule without faults.\n", e.singles, e.all()-1-e.singles, len(e.points))
	b.WriteString("P is the sum, over the schedules with one fault, of the number of faults at the points behind it.\n\n")
	b.WriteString("| step | faults at a point | first faults | second faults |\n|---|---|---|---|\n")
	for _, step := range slices.Sorted(maps.Keys(e.first)) {
		var kinds []string
		for _, f := range (sim.Point{Step: step}).Faults() {
			kinds = append(kinds, f.Kind)
		}
		fmt.Fprintf(&b, "| %s | %s | %d | %d |\n", step, strings.Join(kinds, ", "), e.first[step], e.second[step])
	}
	return b.String()
}
