package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// part is one part of a night, a target of the Makefile.
type part struct{ name, does string }

// parts are all parts of a night, in the order in which they run.
var parts = []part{
	{"faults", "every test, with outages, stalls, kills and the promised times"},
	{"race", "tier 2 with the race detector"},
	{"differential", "fakes against servers, random calls"},
	{"fuzz", "every parser with random input"},
	{"sim", "the shop on the fakes under 20,000 schedules of faults"},
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

// nightly runs the parts, or the one that is named, and writes the report. A part that fails does not keep the next
// from running.
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
