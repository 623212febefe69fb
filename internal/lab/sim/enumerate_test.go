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
		children.Go(func() { all.run(t, i, runtime.NumCPU()) })
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

// progress is a message of a child. A schedule starts; or all schedules with one first fault have ended.
type progress struct {
	Begins string `json:",omitempty"` // the faults, with ", then " between them
	Ended  *ended `json:",omitempty"`
}

// ended counts the schedules with one first fault. Without a first fault, there is one schedule.
type ended struct {
	First   string         // the step of the first fault; empty: none
	Points  int            // of the schedule without faults
	Singles int            // faults at these points, of all children
	Seconds map[string]int // second faults by their step
	Bad     []string       // schedules with findings
	Strayed []string       // schedules that did not reach their last fault as expected, in no run
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
	var e ended
	run := func(before sim.Enumerated, faults ...sim.Fault) sim.Enumerated {
		tell(progress{Begins: text(faults)})
		r, ok := repeated(t, before, faults)
		switch {
		case !ok:
			e.Strayed = append(e.Strayed, text(faults))
		case len(r.Findings) > 0:
			e.Bad = append(e.Bad, text(faults)+"\n"+list(r.Findings))
		}
		return r
	}
	calm := run(sim.Enumerated{})
	singles := faultsOf(calm.Points)
	e.Points, e.Singles = len(calm.Points), len(singles)
	if number == 0 {
		tell(progress{Ended: &e})
	}
	for i := number; i < len(singles); i += children {
		first := singles[i]
		e = ended{First: first.Step, Points: len(calm.Points), Singles: len(singles), Seconds: map[string]int{}}
		r := run(calm, first)
		if *pairs {
			for _, second := range faultsOf(after(r.Points, first.Point)) {
				run(r, first, second)
				e.Seconds[second.Step]++
			}
		}
		tell(progress{Ended: &e})
	}
}

// faultsOf returns all faults at these points.
func faultsOf(points []sim.Point) (faults []sim.Fault) {
	for _, p := range points {
		faults = append(faults, p.Faults()...)
	}
	return faults
}

// after returns the points behind one of them.
func after(points []sim.Point, p sim.Point) []sim.Point {
	return points[slices.Index(points, p)+1:]
}

// maxRuns is how often a schedule is run until its points up to the last fault are those expected.
const maxRuns = 5

// repeated runs a schedule until it has the same points as the schedule before, which has no last fault, up to that fault.
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
	mu        sync.Mutex
	schedules int
	points    int
	singles   int // as the children have listed them
	first     map[string]int
	second    map[string]int
	bad       []string
	strayed   []string
}

// run runs a child to its end.
func (e *enumeration) run(t *testing.T, number, children int) {
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
		e.bad = append(e.bad, fmt.Sprintf("%s\n%v\n%s", running, err, said))
	default:
		t.Errorf("a child failed between two schedules: %v\n%s", err, said)
	}
}

// add counts schedules, and reports whether there are enough bad ones.
func (e *enumeration) add(t *testing.T, one ended) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.first == nil {
		e.first, e.second = map[string]int{}, map[string]int{}
		e.points, e.singles = one.Points, one.Singles
	}
	if one.Points != e.points || one.Singles != e.singles {
		t.Errorf("the schedule without faults has %d points and %d faults, and %d and %d in another process", one.Points, one.Singles, e.points, e.singles)
	}
	e.schedules++
	if one.First != "" {
		e.first[one.First]++
	}
	for step, n := range one.Seconds {
		e.second[step] += n
		e.schedules += n
	}
	e.bad = append(e.bad, one.Bad...)
	e.strayed = append(e.strayed, one.Strayed...)
	return len(e.bad) >= *most
}

func (e *enumeration) report(t *testing.T, head string, took time.Duration) {
	text := e.text(head, took)
	t.Log(text)
	if *to != "" {
		if err := os.WriteFile(*to, []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range e.bad[:min(len(e.bad), *most)] {
		t.Errorf("found after %d schedules: %s", e.schedules, bad)
	}
	for _, strayed := range e.strayed {
		t.Errorf("did not repeat: %s", strayed)
	}
	if n := sum(e.first); len(e.bad) == 0 && (n != e.singles || n == 0) {
		t.Errorf("%d first faults were run, want %d", n, e.singles)
	}
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
	singles, seconds := sum(e.first), sum(e.second)
	fmt.Fprintf(&b, "# Enumerated schedules\n\n%s\n\n", head)
	fmt.Fprintf(&b, "One buyer, one process that serves, two relays, two consumers; at most %d faults. %d of %d schedules were run, %d bad, in %v on %d processors.\n\n",
		min(1+seconds, 2), e.schedules-len(e.strayed), 1+singles+seconds, len(e.bad), took.Round(time.Second), runtime.NumCPU())
	fmt.Fprintf(&b, "N = 1 + S + P = 1 + %d + %d. The schedule without faults has %d points; S is the sum of their faults. P is the sum, over these S schedules, of the faults at the points behind the first fault.\n\n",
		singles, seconds, e.points)
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
