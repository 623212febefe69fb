package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// atOnce is how many packages are tested at the same time. Their tests often wait for servers and clocks.
func atOnce(o options) int {
	if o.tier == 3 {
		return 1 // nightly tests assert times
	}
	return max(3, runtime.NumCPU())
}

// event is a line of `go test -json`.
type event struct {
	Action, Package, Test, Output, ImportPath, FailedBuild string
	Elapsed                                                float64
}

// results has the results of the tests.
type results struct {
	packages map[string]*packageResult
	tests    []testResult
	skips    map[string]int      // by reason
	failed   []string            // packages and tests
	outputs  map[string][]string // by package and test, of those that have not ended
	paused   map[string]bool     // tests that wait for their turn, by package and test
	compile  time.Duration       // CPU time of linking and vetting
	total    int                 // packages to be tested
	usages   map[string]usage
}

type packageResult struct {
	name                    string
	took                    time.Duration
	passed, failed, skipped int
	usage                   usage
}

type testResult struct {
	pkg, name string
	took      time.Duration
}

// runTests runs `go test` over the packages, with env in addition, and prints what happens. It returns an error if something failed.
func runTests(ctx context.Context, o options, dir string, packages map[string]string, env []string) (*results, error) {
	r := &results{packages: map[string]*packageResult{}, skips: map[string]int{}, outputs: map[string][]string{}, paused: map[string]bool{}, total: len(packages)}
	self, err := os.Executable()
	if err != nil {
		return r, err
	}
	args := []string{"test", "-json", "-shuffle=on", "-parallel=8", fmt.Sprintf("-p=%d", atOnce(o)), "-exec", fmt.Sprintf("%q %s", self, wrapperArg)}
	timeout := "-timeout=5m"
	if o.race {
		args = append(args, "-race")
		timeout = "-timeout=20m" // the race detector slows a test down up to tenfold
	}
	if o.tier == 3 {
		timeout = "-timeout=75m"
	}
	args = append(args, timeout)
	cmd := exec.Command("go", append(args, longestFirst(packages)...)...)
	own := os.Environ()
	if o.tier == 1 {
		own = withoutServers(own)
	}
	cmd.Env = append(slices.Concat(own, inMemory("/dev/shm"), env), wrapperVar+"="+dir)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // to end the go command with all of its tests
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return r, err
	}
	defer endGroup(ctx, cmd.Process.Pid, syscall.SIGTERM, 15*time.Second)() // private servers end meanwhile
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadBytes('\n')
		e := event{}
		if json.Unmarshal(line, &e) == nil {
			r.add(dir, packages, e)
		} else if len(line) > 0 {
			os.Stdout.Write(line)
		}
		if err != nil {
			break
		}
	}
	err = cmd.Wait()
	r.compile = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	for _, p := range r.packages {
		r.compile -= p.usage.CPU
	}
	if len(r.failed) > 0 {
		return r, nil // the report says it
	}
	return r, err
}

// endGroup signals a process group when ctx ends, and kills it if it is still there after patience. The returned function
// waits for that, if ctx has ended; it must be called when the first process of the group has ended.
func endGroup(ctx context.Context, pid int, sig syscall.Signal, patience time.Duration) (wait func()) {
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-ended:
			return
		case <-ctx.Done():
		}
		_ = syscall.Kill(-pid, sig)
		for deadline := time.Now().Add(patience); syscall.Kill(-pid, 0) == nil; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(deadline) {
				_ = syscall.Kill(-pid, syscall.SIGKILL)
				return
			}
		}
	}()
	return func() { close(ended); <-done }
}

// withoutServers returns an environment without the variables that make tests reach for servers or run at night.
func withoutServers(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return strings.HasPrefix(name, "HOLDFAST_TEST_") && strings.HasSuffix(name, "_URL") ||
			slices.Contains([]string{"HOLDFAST_TEST_PRIVATE", "HOLDFAST_REQUIRE_SERVERS", "HOLDFAST_NIGHTLY"}, name)
	})
}

// add records an event and prints important ones at once: failures, and a line for each package.
func (r *results) add(dir string, packages map[string]string, e event) {
	key := e.Package + " " + e.Test
	p := r.packages[e.Package]
	if p == nil && e.Package != "" {
		p = &packageResult{name: short(e.Package)}
		r.packages[e.Package] = p
	}
	took := time.Duration(e.Elapsed * float64(time.Second))
	switch e.Action {
	case "build-output":
		fmt.Print(e.Output)
	case "output":
		r.outputs[key] = append(r.outputs[key], e.Output)
	case "pause", "cont":
		r.paused[key] = e.Action == "pause"
	case "pass", "fail", "skip":
		output := r.outputs[key]
		delete(r.outputs, key)
		if e.Test != "" {
			r.addTest(p, e, took, output)
			return
		}
		p.took = took
		if e.Action == "fail" {
			r.addUnfinished(p, e.Package)
			r.failed = append(r.failed, p.name)
			fmt.Println("FAIL", p.name)
			printLines(output)
		}
		var err error
		if p.usage, err = readUsage(dir, packages[e.Package]); err != nil && e.Action == "pass" {
			r.failed = append(r.failed, fmt.Sprintf("%s (its CPU time is unknown: %v)", p.name, err))
		}
		done := 0
		for _, q := range r.packages {
			if q.took > 0 || q == p {
				done++
			}
		}
		fmt.Printf("%-4s %3d/%d  %-44s %6.1f s %6.1f CPU s %5d tests", map[string]string{"pass": "ok", "fail": "FAIL", "skip": "-"}[e.Action],
			done, r.total, p.name, took.Seconds(), p.usage.CPU.Seconds(), p.passed+p.failed)
		if p.skipped > 0 {
			fmt.Printf(", %d skipped", p.skipped)
		}
		fmt.Println()
	}
}

// addUnfinished prints the output of the tests that never ended because their process did, and counts them as failed.
// A test that only waited for its turn is left out.
func (r *results) addUnfinished(p *packageResult, importPath string) {
	for _, key := range slices.Sorted(maps.Keys(r.outputs)) {
		pkg, test, _ := strings.Cut(key, " ")
		if pkg != importPath || test == "" {
			continue
		}
		output := r.outputs[key]
		delete(r.outputs, key)
		if !r.paused[key] {
			p.failed++
			r.failed = append(r.failed, p.name+" "+test+" (did not end)")
			fmt.Println("FAIL", p.name, test, "(did not end)")
			printLines(output)
		}
	}
}

func (r *results) addTest(p *packageResult, e event, took time.Duration, output []string) {
	if e.Action != "fail" {
		// A panic or a timeout is printed under the name of the test that printed last, even if it has ended.
		end := slices.IndexFunc(output, func(line string) bool {
			line = strings.TrimLeft(line, " ")
			return strings.HasPrefix(line, "--- PASS") || strings.HasPrefix(line, "--- SKIP")
		})
		if end >= 0 {
			r.outputs[e.Package+" "] = append(r.outputs[e.Package+" "], output[end+1:]...)
			output = output[:end]
		}
	}
	switch e.Action {
	case "pass":
		p.passed++
	case "skip":
		p.skipped++
		r.skips[reason(output)]++
		return
	case "fail":
		p.failed++
		r.failed = append(r.failed, p.name+" "+e.Test)
		fmt.Println("FAIL", p.name, e.Test)
		printLines(output)
	}
	r.tests = append(r.tests, testResult{p.name, e.Test, took})
}

// reason returns the reason of a skip, in a word or two.
func reason(output []string) string {
	text := strings.Join(output, "")
	switch {
	case strings.Contains(text, "nightly: "):
		return "nightly"
	case strings.Contains(text, "HOLDFAST_TEST_"), strings.Contains(text, "not installed"):
		return "no server"
	default:
		return "other"
	}
}

func printLines(output []string) {
	for _, line := range output {
		if !strings.HasPrefix(line, "=== ") {
			_, _ = io.WriteString(os.Stdout, line)
		}
	}
}

const modulePath = "github.com/holdfast-go/holdfast/"

// short returns an import path as a folder of the repository.
func short(importPath string) string { return strings.TrimPrefix(importPath, modulePath) }

// longestFirst returns the import paths, those with the largest budget first.
func longestFirst(packages map[string]string) []string {
	names := make([]string, 0, len(packages))
	for name := range packages {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		if x, y := budgetOf(short(a)), budgetOf(short(b)); x != y {
			return int(y - x)
		}
		return strings.Compare(a, b)
	})
	return names
}

var errFailed = errors.New("failed")

// progress counts the packages that `go list -v` names on its standard error and prints the number every ten seconds.
// All other lines are printed as they are.
type progress struct {
	to      io.Writer
	began   time.Time
	ticker  *time.Ticker
	stopped chan struct{}

	mu       sync.Mutex
	part     []byte // a line that has not ended
	compiled int
}

func newProgress(to io.Writer) *progress {
	p := &progress{to: to, began: time.Now(), ticker: time.NewTicker(10 * time.Second), stopped: make(chan struct{})}
	go func() {
		for {
			select {
			case <-p.stopped:
				return
			case <-p.ticker.C:
				p.mu.Lock()
				fmt.Fprintf(p.to, "compile: %d packages so far, %.0f s\n", p.compiled, time.Since(p.began).Seconds())
				p.mu.Unlock()
			}
		}
	}()
	return p
}

// Write takes output of the go command.
func (p *progress) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.part = append(p.part, text...)
	for {
		line, rest, ok := bytes.Cut(p.part, []byte("\n"))
		if !ok {
			return len(text), nil
		}
		p.part = rest
		if len(line) > 0 && !bytes.ContainsAny(line, " \t") {
			p.compiled++
		} else if _, err := fmt.Fprintf(p.to, "%s\n", line); err != nil {
			return 0, err
		}
	}
}

// stop ends the printing. A line that has not ended is printed.
func (p *progress) stop() {
	p.ticker.Stop()
	close(p.stopped)
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.part) > 0 {
		fmt.Fprintf(p.to, "%s\n", p.part)
	}
}

// go test runs this program around each test binary, through `-exec`.
const (
	wrapperVar = "HOLDFAST_TEST_WRAPPER" // the folder of the measurements
	wrapperArg = "run-test-binary"
)

// usage is the CPU time that one test binary has used, with the servers that it started itself.
type usage struct {
	Dir   string                   // of the package
	CPU   time.Duration            // of all processes
	Tests map[string]time.Duration // of the top-level tests; see attribute
}

// measured runs a test binary, writes down its CPU time, and returns its exit code.
func measured(dir string, args []string) int {
	runtime.LockOSThread() // the test binary ends with the thread that started it
	out, in, err := os.Pipe()
	if err != nil {
		fmt.Fprintln(os.Stderr, "test:", err)
		return exitUnusable
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = in, in // one pipe keeps a panic after the lines before it
	cmd.SysProcAttr = dieWithParent()
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "test:", err)
		return exitUnusable
	}
	_ = in.Close()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGQUIT) // SIGQUIT: go test's timeout
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s)
		}
	}()
	tests := make(chan map[string]time.Duration, 1)
	go func() { tests <- attribute(out, os.Stdout, func() time.Duration { return cpuTime(cmd.Process.Pid) }) }()
	_ = cmd.Wait()
	_ = out.SetReadDeadline(time.Now().Add(10 * time.Second)) // a leftover process may keep the pipe open
	u := usage{Tests: <-tests}
	u.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	u.Dir, _ = os.Getwd()
	if text, err := json.Marshal(u); err == nil {
		_ = os.WriteFile(usageFile(dir, u.Dir), text, 0o644) // the runner fails if it is missing
	}
	code := cmd.ProcessState.ExitCode()
	if code != 0 && code != 1 { // 1 means a failed test
		fmt.Printf("test binary ended: %s\n", cmd.ProcessState)
	}
	if code < 0 { // a signal
		return 1
	}
	return code
}

// usageFile is the file in dir with the usage of the package in the folder of.
func usageFile(dir, of string) string {
	return filepath.Join(dir, strings.NewReplacer("/", "-", " ", "-").Replace(of)+".usage")
}

func readUsage(dir, of string) (usage, error) {
	var u usage
	text, err := os.ReadFile(usageFile(dir, of))
	if err == nil {
		err = json.Unmarshal(text, &u)
	}
	return u, err
}

// marker is a line in which a top-level test starts, stops or resumes running.
var marker = regexp.MustCompile(`^\x16?(=== RUN |=== PAUSE|=== CONT |--- PASS:|--- FAIL:|--- SKIP:) +([^/\s]+)(\s|$)`)

// attribute copies the output of a test binary and returns the CPU time of its top-level tests. The CPU time between two
// markers is divided equally among the tests that ran meanwhile, so the figure of one test is an estimate and the sum is
// exact.
func attribute(from io.Reader, to io.Writer, cpu func() time.Duration) map[string]time.Duration {
	used, running := map[string]time.Duration{}, map[string]bool{}
	var last time.Duration
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadBytes('\n')
		if m := marker.FindSubmatch(line); m != nil {
			now := cpu()
			for name := range running {
				used[name] += max(0, now-last) / time.Duration(len(running))
			}
			last = max(last, now)
			if name := string(m[2]); bytes.HasPrefix(m[1], []byte("=== RUN")) || bytes.HasPrefix(m[1], []byte("=== CONT")) {
				running[name] = true
			} else {
				delete(running, name)
			}
		}
		_, _ = to.Write(line)
		if err != nil {
			return used
		}
	}
}
