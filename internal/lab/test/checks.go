package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	_ "embed"
	"errors"
	"fmt"
	"go/format"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// checkProc fails on Linux without a mounted /proc: the tests' servers need it, and so does
// finding and ending their processes.
func checkProc(dir string) error {
	if runtime.GOOS != "linux" {
		return nil
	}
	if _, err := os.Stat(filepath.Join(dir, "self")); err != nil {
		return fmt.Errorf("%w: a mounted %s (mount -t proc proc /proc)", errUnusable, dir)
	}
	return nil
}

// certificates reports whether this machine has any CA certificates.
func certificates() bool {
	pool, err := x509.SystemCertPool()
	return err == nil && !pool.Equal(x509.NewCertPool())
}

// checkFormat names the Go files below dir that gofmt would change.
func checkFormat(dir string) error {
	var wrong []string
	err := walk(dir, func(path string) error {
		if filepath.Ext(path) != ".go" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		formatted, err := format.Source(text)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if !bytes.Equal(text, formatted) {
			wrong = append(wrong, path)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if len(wrong) > 0 {
		return fmt.Errorf("not formatted by gofmt: %s", strings.Join(wrong, " "))
	}
	return nil
}

// sums returns the content of the files below dir that the go command maintains.
func sums(dir string) (map[string]string, error) {
	found := map[string]string{}
	err := walk(dir, func(path string) error {
		switch filepath.Base(path) {
		case "go.mod", "go.sum", "go.work", "go.work.sum":
			text, err := os.ReadFile(path)
			found[path] = string(text)
			return err
		}
		return nil
	})
	return found, err
}

// checkSums fails if compiling has changed a file that the go command maintains, or if an earlier run did and the change
// is in no commit yet. It looks at go.work.sum only for the latter: the go command changes no other file by itself.
func checkSums(ctx context.Context, before map[string]string) error {
	after, err := sums(".")
	if err != nil {
		return err
	}
	if err := unchanged(before, after); err != nil {
		return err
	}
	var exit *exec.ExitError
	err = exec.CommandContext(ctx, "git", "diff", "--quiet", "--", "go.work.sum").Run()
	if errors.As(err, &exit) && exit.ExitCode() == 1 { // other codes: not a clone, or no git
		return errors.New("go.work.sum has changed: commit it (git add go.work.sum)")
	}
	return nil
}

// unchanged names the files that differ. The change is left where it is, ready to be committed.
func unchanged(before, after map[string]string) error {
	var changed []string
	for _, path := range slices.Sorted(maps.Keys(after)) {
		if text, ok := before[path]; !ok || text != after[path] {
			changed = append(changed, path)
		}
	}
	if len(changed) > 0 {
		return fmt.Errorf("the go command has changed %s: commit the change (git add %[1]s)", strings.Join(changed, " "))
	}
	return nil
}

// walk calls visit with each file below dir, without hidden folders.
func walk(dir string, visit func(path string) error) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if path != dir && strings.HasPrefix(entry.Name(), ".") {
				return fs.SkipDir
			}
			return nil
		}
		return visit(path)
	})
}

// part is one part of a night, a target of the Makefile.
type part struct{ name, does string }

// parts are all parts of a night, in the order in which they run.
var parts = []part{
	{"faults", "every test, with outages, stalls, kills and the promised times"},
	{"race", "tier 2 with the race detector"},
	{"differential", "fakes against servers, random calls"},
	{"fuzz", "every parser with random input"},
	{"sim", "the shop on the fakes under 20,000 schedules of faults"},
	{"pairs", "a small shop on the fakes under every pair of faults"},
	{"planted", "known bugs that the checks must find"},
	{"browser", "the pages in Chromium, at scale"},
	{"chaos", "the shop as processes, one seed of faults"},
	{"clusters", "the shop on clusters whose nodes are killed and cut off"},
	{"soak", "what must stay flat"},
	{"matrix", "the adapters on each packaged version of the servers"},
}

func partNames() (names []string) {
	for _, p := range parts {
		names = append(names, p.name)
	}
	return names
}

const nightlyReport = "internal/lab/nightly.md"

// nightly runs the parts, or the named one, and writes the report. A failed part does not stop the next one.
func nightly(ctx context.Context, only string) error {
	root, err := repository()
	if err != nil {
		return err
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if only != "" && !slices.Contains(partNames(), only) {
		return usageError(fmt.Sprintf("unknown part %q; parts: %s", only, strings.Join(partNames(), ", ")))
	}
	rows, err := readNightly()
	if err != nil {
		return err
	}
	var failed []string
	for _, p := range parts {
		if only != "" && p.name != only {
			continue
		}
		fmt.Printf("nightly: make %s: %s\n", p.name, p.does)
		row := runPart(ctx, p)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if rows[p.name] = row; !strings.HasSuffix(row, "| passed |") {
			failed = append(failed, p.name)
		}
		if err := writeNightly(rows); err != nil {
			return err
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("failed: %s", strings.Join(failed, ", "))
	}
	return nil
}

// runPart runs one part and returns its row of the report.
func runPart(ctx context.Context, p part) string {
	commit, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		commit = []byte("unknown")
	}
	began := time.Now()
	cmd := exec.Command("make", p.name)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	result := "passed"
	err = cmd.Start()
	if err == nil {
		// A part that runs tests gives them 15 s to end.
		wait := endGroup(ctx, cmd.Process.Pid, syscall.SIGINT, 20*time.Second)
		err = cmd.Wait()
		wait()
	}
	if err != nil {
		result = "FAILED: " + err.Error()
	}
	return fmt.Sprintf("| `make %s` | %s | %s | %s | %v | %s |", p.name, p.does, began.UTC().Format("2006-01-02"),
		strings.TrimSpace(string(commit)), time.Since(began).Round(time.Second), result)
}

const nightlyHead = "| command | does | date | commit | took | result |"

// readNightly returns the rows of the last report by part.
func readNightly() (map[string]string, error) {
	rows := map[string]string{}
	text, err := os.ReadFile(nightlyReport)
	if errors.Is(err, os.ErrNotExist) {
		return rows, nil
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "| `make "); ok {
			name, _, _ := strings.Cut(rest, "`")
			rows[name] = strings.TrimSpace(line)
		}
	}
	return rows, err
}

func writeNightly(rows map[string]string) error {
	return os.WriteFile(nightlyReport, []byte(nightlyText(rows)), 0o644)
}

func nightlyText(rows map[string]string) string {
	lines := []string{
		"# The last night", "",
		fmt.Sprintf("Written by `make nightly`, and by `go run ./internal/lab/test -part=PART` for one part. Machine: %s/%s, %d CPUs, %s.",
			runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), runtime.Version()), "",
		nightlyHead, "|---|---|---|---|---|---|",
	}
	for _, p := range parts {
		lines = append(lines, cmp.Or(rows[p.name], fmt.Sprintf("| `make %s` | %s | | | | not run |", p.name, p.does)))
	}
	return strings.Join(lines, "\n") + "\n"
}

//go:embed budget.txt
var budgetText string

// The budgets of packages and tests that budget.txt does not name.
const (
	packageBudget = 8 * time.Second
	testBudget    = 10 * time.Second
)

// budgets are the CPU times of budget.txt by package, or by package and test.
var budgets = parseBudgets(budgetText)

func parseBudgets(text string) map[string]time.Duration {
	found := map[string]time.Duration{}
	for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
		line, _, _ := strings.Cut(lines.Text(), "#")
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		seconds, err := strconv.ParseFloat(fields[len(fields)-1], 64)
		if err != nil {
			panic(fmt.Sprintf("budget.txt: %q", lines.Text()))
		}
		found[strings.Join(fields[:len(fields)-1], " ")] = time.Duration(seconds * float64(time.Second))
	}
	return found
}

func budgetOf(pkg string) time.Duration {
	if budget, ok := budgets[pkg]; ok {
		return budget
	}
	return packageBudget
}

// overBudget names the packages and tests that used more CPU time than they may.
func (r *results) overBudget() (over []string) {
	for _, p := range r.packages {
		if budget := budgetOf(p.name); p.usage.CPU > budget {
			over = append(over, fmt.Sprintf("%s used %.1f CPU s, its budget is %.1f", p.name, p.usage.CPU.Seconds(), budget.Seconds()))
		}
		for test, used := range p.usage.Tests {
			name := p.name + " " + test
			if budget := cmp.Or(budgets[name], min(testBudget, budgetOf(p.name))); used > budget {
				over = append(over, fmt.Sprintf("%s used about %.1f CPU s, its budget is %.1f", name, used.Seconds(), budget.Seconds()))
			}
		}
	}
	slices.Sort(over)
	return over
}

// report prints the tables and returns an error if the run failed.
func (r *results) report(w io.Writer, o options, c *clock, servers time.Duration) error {
	const most = 12
	packages := slices.SortedFunc(maps.Values(r.packages), func(a, b *packageResult) int { return cmp.Compare(b.usage.CPU, a.usage.CPU) })
	fmt.Fprintf(w, "\n%-46s %8s %8s\n", "packages by CPU time", "CPU s", "s")
	var tests time.Duration
	var passed, failed, skipped int
	for i, p := range packages {
		tests += p.usage.CPU
		passed, failed, skipped = passed+p.passed, failed+p.failed, skipped+p.skipped
		if i < most {
			fmt.Fprintf(w, "  %-44s %8.1f %8.1f\n", p.name, p.usage.CPU.Seconds(), p.took.Seconds())
		}
	}
	slices.SortFunc(r.tests, func(a, b testResult) int { return cmp.Compare(b.took, a.took) })
	fmt.Fprintf(w, "\n%-71s %8s\n", "slowest tests", "s")
	for _, t := range leaves(r.tests, most) {
		fmt.Fprintf(w, "  %-69s %8.1f\n", t.pkg+" "+t.name, t.took.Seconds())
	}
	fmt.Fprintf(w, "\nCPU s: tests %.0f, servers %.0f, vet and link %.0f. Wall s:", tests.Seconds(), servers.Seconds(), r.compile.Seconds())
	for _, p := range c.phases {
		fmt.Fprintf(w, " %s %.0f,", p.name, p.took.Seconds())
	}
	fmt.Fprintf(w, " all %.0f\n", time.Since(c.began).Seconds())
	var over []string
	if o.tier < 3 && !o.race {
		over = r.overBudget()
		if budget := budgets["servers"]; servers > budget && len(o.packages) == 0 {
			over = append(over, fmt.Sprintf("the servers used %.1f CPU s, their budget is %.1f", servers.Seconds(), budget.Seconds()))
		}
	}
	for _, line := range over {
		fmt.Fprintln(w, "over budget:", line)
	}
	for _, name := range r.failed {
		fmt.Fprintln(w, "failed:", name)
	}
	fmt.Fprintf(w, "skipped: %d nightly, %d without a server, %d for other reasons\n", r.skips["nightly"], r.skips["no server"], r.skips["other"])
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	switch {
	case len(r.failed) > 0:
		return errFailed
	case len(over) > 0:
		return fmt.Errorf("%w: over budget (internal/lab/test/budget.txt)", errFailed)
	case len(r.packages) < r.total:
		return fmt.Errorf("%w: %d of %d packages did not run", errFailed, r.total-len(r.packages), r.total)
	}
	return nil
}

// leaves returns the first tests that have no subtests among those given, n at most.
func leaves(sorted []testResult, n int) (found []testResult) {
	parents := map[string]bool{}
	for _, t := range sorted {
		for i := strings.LastIndexByte(t.name, '/'); i > 0; i = strings.LastIndexByte(t.name[:i], '/') {
			parents[t.pkg+" "+t.name[:i]] = true
		}
	}
	for _, t := range sorted {
		if len(found) < n && !parents[t.pkg+" "+t.name] {
			found = append(found, t)
		}
	}
	return found
}
