package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// The CPU time between two markers is divided among the tests that ran meanwhile, and the output passes unchanged.
func TestAttribute_sharesTimeAmongRunningTests(t *testing.T) {
	t.Parallel()
	const output = "\x16=== RUN   TestA\n\x16=== PAUSE TestA\n\x16=== RUN   TestB\n\x16--- PASS: TestB (1.00s)\n" +
		"\x16=== CONT  TestA\n\x16=== RUN   TestA/sub\n\x16=== CONT  TestC\n\x16--- PASS: TestA (1.00s)\n    \x16--- PASS: TestA/sub (1.00s)\n\x16--- FAIL: TestC (1.00s)\n"
	var copied strings.Builder
	now := time.Duration(0)
	used := attribute(strings.NewReader(output), &copied, func() time.Duration { now += time.Second; return now })
	if copied.String() != output {
		t.Errorf("the output was changed: %q", copied.String())
	}
	// markers at 1 s to 8 s: A runs 1-2, B 3-4, A 5-6, A and C 6-7, C 7-8
	want := map[string]time.Duration{"TestA": 2500 * time.Millisecond, "TestB": time.Second, "TestC": 1500 * time.Millisecond}
	for name, d := range want {
		if used[name] != d {
			t.Errorf("%s: %v, want %v", name, used[name], d)
		}
	}
}

func TestReport_failsOverBudget(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		cpu  time.Duration
		test time.Duration
		tier int
		want bool
	}{
		{"within", time.Second, time.Second, 2, false},
		{"package over", packageBudget + 1, 0, 2, true},
		{"test over", time.Second, testBudget + 1, 2, true},
		{"tier 1", packageBudget + 1, 0, 1, true},
		{"nightly", packageBudget + 1, 0, 3, false},
	} {
		p := &packageResult{name: "none/such", took: 1, passed: 1, usage: usage{CPU: tc.cpu, Tests: map[string]time.Duration{"TestA": tc.test}}}
		r := &results{packages: map[string]*packageResult{"p": p}, total: 1}
		var text strings.Builder
		if err := r.report(&text, options{tier: tc.tier}, newClock(), 0); errors.Is(err, errFailed) != tc.want {
			t.Errorf("%s: error %v\n%s", tc.name, err, text.String())
		}
	}
}

func TestReport_failsIfServersAreOverBudget(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name     string
		used     time.Duration
		packages []string
		want     bool
	}{
		{"within", time.Minute, nil, false},
		{"over", budgets["servers"] + 1, nil, true},
		{"over in some packages", budgets["servers"] + 1, []string{"./outbox"}, false},
	} {
		r := &results{}
		var text strings.Builder
		if err := r.report(&text, options{tier: 2, packages: tc.packages}, newClock(), tc.used); errors.Is(err, errFailed) != tc.want {
			t.Errorf("%s: error %v\n%s", tc.name, err, text.String())
		}
	}
}

// A passed package fails the run if its CPU time was not measured, because no budget was checked.
func TestResults_failWithoutUsage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(usageFile(dir, "/a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(usageFile(dir, "/b"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &results{packages: map[string]*packageResult{}}
	for _, pkg := range []string{"a", "b", "c"} {
		r.add(dir, map[string]string{"a": "/a", "b": "/b", "c": "/c"}, event{Action: "pass", Package: pkg})
	}
	if len(r.failed) != 2 || !strings.HasPrefix(r.failed[0], "a ") || !strings.HasPrefix(r.failed[1], "c ") {
		t.Errorf("failed: %q, want a and c", r.failed)
	}
}

func TestWithoutServers_dropsAddresses(t *testing.T) {
	t.Parallel()
	got := withoutServers([]string{"HOME=/h", "HOLDFAST_TEST_REDIS_URL=redis://r", "HOLDFAST_TEST_PRIVATE=1", "HOLDFAST_REQUIRE_SERVERS=1", "HOLDFAST_NIGHTLY=1", "HOLDFAST_FUZZ_SEQUENCES=9"})
	if want := []string{"HOME=/h", "HOLDFAST_FUZZ_SEQUENCES=9"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestFromRoot_resolvesInCurrentFolder(t *testing.T) {
	t.Parallel()
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	got, err := fromRoot(root, []string{".", "./...", "../sim", "work", "example.com/p"})
	if want := []string{"./internal/lab/test", "./internal/lab/test/...", "./internal/lab/sim", "work", "example.com/p"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, error %v; want %q", got, err, want)
	}
}

func TestProgress_countsPackagesAndPrintsErrors(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	p := newProgress(&text)
	for _, part := range []string{"runt", "ime\nexample.com/a\n# example.com/b\na.go:1:1: unde", "fined: x\nno end: b"} {
		if _, err := p.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	p.stop()
	if want := "# example.com/b\na.go:1:1: undefined: x\nno end: b\n"; p.compiled != 2 || text.String() != want {
		t.Errorf("%d packages, output %q; want 2, %q", p.compiled, text.String(), want)
	}
}

func TestNightly_listsPartsThatNeverRan(t *testing.T) {
	t.Parallel()
	text := nightlyText(map[string]string{"race": "| `make race` | … | passed |"})
	for _, want := range []string{"| `make race` | … | passed |\n", "| `make faults` | every test, with outages, stalls, kills and the promised times | | | | not run |\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

// An interrupt reaches the whole process group. A process that ignores the signal is killed.
func TestEndGroup_killsProcessesThatIgnoreSignal(t *testing.T) {
	t.Parallel()
	for _, script := range []string{"echo; sleep 1000", "trap '' INT; sleep 1000 & echo; sleep 1000"} {
		out, in, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cmd := exec.Command("sh", "-c", script)
		cmd.Stdout, cmd.SysProcAttr = in, &syscall.SysProcAttr{Setpgid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_ = in.Close()
		_, _ = out.Read(make([]byte, 1)) // the trap is set
		wait := endGroup(ctx, cmd.Process.Pid, syscall.SIGINT, 100*time.Millisecond)
		cancel()
		_ = out.SetReadDeadline(time.Now().Add(testenv.Patience))
		if _, err := io.ReadAll(out); err != nil { // it ends when every process has
			t.Errorf("%s: processes are still there: %v", script, err)
		}
		_ = cmd.Wait()
		wait()
		_ = out.Close()
	}
}

// The summary has a failed test, and the reason of a skip. A package that did not run fails the run.
func TestReport_namesFailuresAndSkips(t *testing.T) {
	t.Parallel()
	r := &results{packages: map[string]*packageResult{}, skips: map[string]int{}, outputs: map[string][]string{}, paused: map[string]bool{}, total: 2}
	for _, e := range []event{
		{Action: "output", Package: modulePath + "a", Test: "TestSkip", Output: "    a_test.go:1: nightly: it is slow\n"},
		{Action: "skip", Package: modulePath + "a", Test: "TestSkip"},
		{Action: "fail", Package: modulePath + "a", Test: "TestBad", Elapsed: 1},
		{Action: "fail", Package: modulePath + "a", Elapsed: 2},
	} {
		r.add(t.TempDir(), nil, e)
	}
	var text strings.Builder
	if err := r.report(&text, options{tier: 1}, newClock(), 0); !errors.Is(err, errFailed) {
		t.Errorf("error %v", err)
	}
	for _, want := range []string{"failed: a TestBad\n", "failed: a\n", "skipped: 1 nightly", "\n0 passed, 1 failed, 1 skipped\n"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	r.failed = nil
	if err := r.report(&text, options{tier: 1}, newClock(), 0); !errors.Is(err, errFailed) {
		t.Errorf("a package did not run: error %v", err)
	}
}

// A test binary that ends with tests unfinished names them. Tests that waited for their turn are left out.
func TestResults_nameUnfinishedTests(t *testing.T) {
	t.Parallel()
	r := &results{packages: map[string]*packageResult{}, skips: map[string]int{}, outputs: map[string][]string{}, paused: map[string]bool{}, total: 1}
	const pkg = modulePath + "a"
	for _, e := range []event{
		{Action: "output", Test: "TestWaits", Output: "=== PAUSE TestWaits\n"},
		{Action: "pause", Test: "TestWaits"},
		{Action: "output", Test: "TestHangs", Output: "=== PAUSE TestHangs\n"},
		{Action: "pause", Test: "TestHangs"},
		{Action: "cont", Test: "TestHangs"},
		{Action: "output", Test: "TestHangs", Output: "    a_test.go:1: waiting\n"},
		{Action: "output", Test: "TestEnds", Output: "--- PASS: TestEnds (0.00s)\n"},
		{Action: "pass", Test: "TestEnds"},
		{Action: "fail", Elapsed: 2},
	} {
		e.Package = pkg
		r.add(t.TempDir(), nil, e)
	}
	if want := []string{"a TestHangs (did not end)", "a"}; !slices.Equal(r.failed, want) {
		t.Errorf("failed: %q, want %q", r.failed, want)
	}
	if r.packages[pkg].failed != 1 {
		t.Errorf("%d failed tests, want 1", r.packages[pkg].failed)
	}
}

// The go command prints a panic under the name of the test that printed last. It is kept when that test has passed.
func TestResults_keepPanicAfterPassedTest(t *testing.T) {
	t.Parallel()
	for _, ended := range []string{"pass", "skip"} {
		r := &results{packages: map[string]*packageResult{}, skips: map[string]int{}, outputs: map[string][]string{}, paused: map[string]bool{}, total: 1}
		const pkg = modulePath + "a"
		for _, e := range []event{
			{Action: "output", Test: "TestA/sub", Output: "    a_test.go:1: a log\n"},
			{Action: "output", Test: "TestA/sub", Output: "    --- " + strings.ToUpper(ended) + ": TestA/sub (0.00s)\n"},
			{Action: "output", Test: "TestA/sub", Output: "panic: boom\n"},
			{Action: ended, Test: "TestA/sub"},
		} {
			e.Package = pkg
			r.add(t.TempDir(), nil, e)
		}
		if got := r.outputs[pkg+" "]; !slices.Equal(got, []string{"panic: boom\n"}) {
			t.Errorf("%s: output of the package: %q", ended, got)
		}
	}
}

func TestChecks_findUnformattedAndChangedFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{"a.go": "package  a\n", "go.work.sum": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := checkFormat(dir); err == nil || !strings.Contains(err.Error(), "a.go") {
		t.Errorf("unformatted file: %v", err)
	}
	before, err := sums(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "go.work.sum"), []byte("more\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	after, err := sums(dir)
	if err != nil {
		t.Fatal(err)
	}
	if unchanged(before, before) != nil || unchanged(before, after) == nil {
		t.Error("the changed file was not found, or an unchanged one was")
	}
	if err := checkProc(dir); !errors.Is(err, errUnusable) {
		t.Errorf("without /proc: %v", err)
	}
}
