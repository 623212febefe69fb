package sim_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/provenance"
	"github.com/holdfast-go/holdfast/internal/lab/sim"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

var (
	seeds = flag.Int("seeds", 100, "how many schedules TestSchedules runs")
	first = flag.Uint64("first", 1, "the seed of the first")
	seed  = flag.Uint64("seed", 0, "the seed that TestSeed runs; 0: none")
	to    = flag.String("report", "", "a file for the report of TestSchedules, as Markdown")
	most  = flag.Int("most", 5, "how many bad schedules end TestSchedules")
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(testenv.Run(m))
}

// TestSchedules runs schedules in one child process per processor. On one processor a schedule is nearly always the
// same, and a child that crashes has named its seed.
func TestSchedules(t *testing.T) {
	if *seeds < 1 {
		t.Fatal("no schedule is to be run")
	}
	began := time.Now()
	head := provenance.Head(command(), began)
	var sum summary
	var children sync.WaitGroup
	for i := range runtime.NumCPU() {
		children.Go(func() { sum.run(t, i, runtime.NumCPU()) })
	}
	children.Wait()
	sum.report(t, head, time.Since(began)) // timing: it is printed
}

// childEnv makes a process a child: it has the child's number and the number of children.
const childEnv = "HOLDFAST_SIM_CHILD"

// line is a message of a child: a schedule starts, or has ended.
type line struct {
	Begins uint64      `json:",omitempty"`
	Ended  *sim.Result `json:",omitempty"`
}

func TestChild(t *testing.T) {
	var number, all int
	if _, err := fmt.Sscan(os.Getenv(childEnv), &number, &all); err != nil {
		return // not a child
	}
	out := json.NewEncoder(os.Stdout)
	for i := number; i < *seeds; i += all {
		if err := out.Encode(line{Begins: *first + uint64(i)}); err != nil {
			t.Fatal(err)
		}
		r := sim.Run(t, *first+uint64(i), nil)
		if err := out.Encode(line{Ended: &r}); err != nil {
			t.Fatal(err)
		}
	}
}

// summary collects the messages of all children.
type summary struct {
	mu        sync.Mutex
	schedules int
	requests  int
	denied    int
	lasted    time.Duration
	outcomes  map[string]int
	fired     map[place]int
	bad       []bad
}

// place is a kind of fault and the step at which it happened. Without a step it belongs to none.
type place struct{ kind, step string }

// placeOf parses a name in Result.Fired.
func placeOf(fault string) place {
	kind, where, _ := strings.Cut(fault, ": ")
	_, at, _ := strings.Cut(where, ", ")
	if end := strings.LastIndexByte(at, ' '); end > 0 {
		return place{kind, at[:end]}
	}
	return place{kind: kind}
}

// bad is a failed schedule, with the number of schedules that had ended by then.
type bad struct {
	sim.Result
	after int
}

// run runs a child to its end.
func (s *summary) run(t *testing.T, number, all int) {
	var running uint64
	said, err := child(t, fmt.Sprintf("%s=%d %d", childEnv, number, all), "-test.run=^TestChild$", func(text []byte) (known, enough bool) {
		var l line
		if json.Unmarshal(text, &l) != nil {
			return false, false
		}
		running = l.Begins
		return true, l.Ended != nil && s.add(*l.Ended)
	}, fmt.Sprintf("-seeds=%d", *seeds), fmt.Sprintf("-first=%d", *first))
	switch {
	case err == nil:
	case running != 0:
		s.add(sim.Result{Seed: running, Findings: []string{err.Error(), said}})
	default:
		t.Errorf("a child failed between two schedules: %v\n%s", err, said)
	}
}

// child runs a test in a process of its own, on one processor. It passes each line of the output to take, which reports
// whether it knows the line, and whether the process has done enough and is to be killed. It returns all other output.
func child(t *testing.T, env, test string, take func(line []byte) (known, enough bool), args ...string) (said string, err error) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], append([]string{test, "-test.timeout=0"}, args...)...)
	cmd.Env = append(os.Environ(), env, "GOMAXPROCS=1", "GOGC=400")
	var complaints, printed strings.Builder
	cmd.Stderr = &complaints
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	lines := bufio.NewScanner(out)
	for lines.Buffer(nil, 16<<20); lines.Scan(); {
		known, enough := take(lines.Bytes())
		if enough {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			return "", nil
		}
		if !known {
			fmt.Fprintln(&printed, lines.Text())
		}
	}
	if lines.Err() != nil { // else it would wait for a reader
		_ = cmd.Process.Kill()
	}
	err = errors.Join(lines.Err(), cmd.Wait())
	return complaints.String() + printed.String(), err
}

// add counts a result, and reports whether there are enough bad ones.
func (s *summary) add(r sim.Result) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.schedules++
	s.requests += r.Requests
	s.denied += r.Denied
	s.lasted += r.Lasted
	if s.fired == nil {
		s.fired, s.outcomes = map[place]int{}, map[string]int{}
	}
	for _, fault := range r.Fired {
		s.fired[placeOf(fault)]++
	}
	for outcome, n := range r.Outcomes {
		s.outcomes[outcome] += n
	}
	if len(r.Findings) > 0 {
		s.bad = append(s.bad, bad{r, s.schedules})
	}
	return len(s.bad) >= *most
}

// publish logs a report, and writes it to the file of the flag -report.
func publish(t *testing.T, text string) {
	t.Helper()
	t.Log(text)
	if *to == "" {
		return
	}
	if err := os.WriteFile(*to, []byte(text), 0o644); err != nil {
		t.Error(err)
	}
}

func (s *summary) report(t *testing.T, head string, took time.Duration) {
	publish(t, s.text(head, took))
	for _, r := range s.bad {
		t.Errorf("seed %d, found after %d schedules; go test ./internal/lab/sim -run=TestSeed -seed=%d -v shrinks it\n%s", r.Seed, r.after, r.Seed, list(r.Findings))
	}
	if len(s.bad) == 0 && s.schedules != *seeds {
		t.Errorf("%d schedules were run, want %d", s.schedules, *seeds)
	}
	for _, what := range s.untested() {
		t.Errorf("%s in %d schedules: it was not tested", what, s.schedules)
	}
}

// untested returns the things that had to happen but did not, because then nothing is proven.
func (s *summary) untested() (what []string) {
	for _, outcome := range outcomes {
		if s.outcomes[outcome] == 0 {
			what = append(what, "no reservation was "+outcome)
		}
	}
	if s.denied == 0 {
		what = append(what, "no request met the rate limit")
	}
	for _, step := range s.missed() {
		what = append(what, "no fault happened at the step "+step)
	}
	return what
}

// manySchedules is how many schedules meet a fault at every step. The rarest steps are "move" and "key extend",
// with about ten faults in that many.
const manySchedules = 1000

// rareSteps are steps that need more schedules. "give back" has two faults per thousand schedules: in about one of
// eight thousands it has none.
var rareSteps = map[string]int{"give back": 10 * manySchedules}

// missed returns the steps at which a fault should have happened, but none did.
func (s *summary) missed() (steps []string) {
	met := map[string]bool{}
	for at := range s.fired {
		met[at.step] = true
	}
	for step := range sim.Possible() {
		if !met[step] && s.schedules >= max(manySchedules, rareSteps[step]) {
			steps = append(steps, step)
		}
	}
	slices.Sort(steps)
	return steps
}

// outcomes are the final statuses of reservations.
var outcomes = []string{"held", "confirmed", "cancelled", "expired"}

// command is the command to run this again.
func command() string { return fmt.Sprintf("make sim SCHEDULES=%d", *seeds) }

// text returns the report as Markdown.
func (s *summary) text(head string, took time.Duration) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Simulation\n\n%s\n\nSeeds %d to %d: %d schedules, %d bad. Two processes of each role, %d requests with a key; a schedule lasts %v on its own clock.\n",
		head, *first, *first+uint64(*seeds)-1, s.schedules, len(s.bad), s.requests, (s.lasted / time.Duration(max(1, s.schedules))).Round(time.Second))
	fmt.Fprintf(&b, "%.0f schedules a minute on %d processors, in %v.\n\nReservations:", float64(s.schedules)/took.Minutes(), runtime.NumCPU(), took.Round(time.Second))
	for i, outcome := range outcomes {
		fmt.Fprintf(&b, "%s %d %s", []string{"", ","}[min(i, 1)], s.outcomes[outcome], outcome)
	}
	fmt.Fprintf(&b, ". The limit was met %d times", s.denied)
	b.WriteString(".\n\n| step | faults |\n|---|---|\n")
	faults := sim.Possible()
	for _, step := range slices.Sorted(maps.Keys(faults)) {
		fmt.Fprintf(&b, "| %s | %s |\n", step, s.count(step, faults[step]))
	}
	fmt.Fprintf(&b, "| none | %s |\n", s.count("", []string{"stopped", "server away", "keys forgotten"}))
	b.WriteString("\nFaults of attempts, fast clocks and slow wires are in about half of the schedules each; a user may ask 5 to 8 times a minute in a quarter, else 20 times.\n")
	return b.String()
}

// count lists how often each kind of fault has happened at a step.
func (s *summary) count(step string, kinds []string) string {
	var counts []string
	for _, kind := range kinds {
		counts = append(counts, fmt.Sprintf("%s %d", kind, s.fired[place{kind, step}]))
	}
	return strings.Join(counts, ", ")
}

func list(lines []string) string { return "\t" + strings.Join(lines, "\n\t") }

// tries is how often TestSeed runs its schedule, because its result may vary.
const tries = 10

// TestSeed runs one schedule. If it fails, it searches for the faults that matter.
func TestSeed(t *testing.T) {
	if *seed == 0 {
		return
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for range tries {
		r := sim.Run(t, *seed, nil)
		if len(r.Findings) == 0 {
			continue
		}
		t.Logf("seed %d with %d faults:\n%s", r.Seed, len(r.Fired), list(r.Findings))
		r = sim.Shrink(t, r)
		t.Fatalf("with these %d faults alone:\n%s\nit finds:\n%s", len(r.Fired), list(r.Fired), list(r.Findings))
	}
}
