// Command planted inserts known bugs, one after the other, and runs the checks that must find them: a check
// that cannot fail proves nothing.
//
//	go run ./internal/lab/servers -- go run ./internal/lab/planted
//	go run ./internal/lab/planted -only=dedup -seeds=5000
//
// The first command has servers for the suites. The simulation needs none.
//
// A bug is a change to one file, compiled in with the overlay of the go command, so that no file of the
// repository changes. For each bug the command runs the check that must catch it: the simulation of package
// sim, or a suite of the package. It prints which check caught it, and after how many schedules. It fails if a
// bug was not caught, or if a check fails without a bug. The table in report.md is its output.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/provenance"
)

var (
	only   = flag.String("only", "", "plant only the bugs whose names contain this `text`")
	seeds  = flag.Int("seeds", 1000, "maximum schedules of the simulation for one bug")
	report = flag.String("report", "", "also write the table to this `file`")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "planted:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	root, err := repository()
	if err != nil {
		return err
	}
	head := head()
	chosen := slices.DeleteFunc(slices.Clone(bugs), func(b bug) bool { return !strings.Contains(b.name, *only) })
	if len(chosen) == 0 {
		return fmt.Errorf("no bug has a name with %q", *only)
	}
	sound := map[string]error{} // results of each package's checks without a bug
	table := []string{"| bug | in | caught by | after |", "|---|---|---|---|"}
	var escaped []string
	for i, b := range chosen {
		fmt.Fprintf(os.Stderr, "planted: %d of %d: %s\n", i+1, len(chosen), b.name)
		if _, known := sound[b.by.pkg]; !known {
			sound[b.by.pkg] = together(b.by.pkg, chosen).passes(ctx, root)
		}
		after, err := "", sound[b.by.pkg]
		if err == nil {
			after, err = b.plant(ctx, root)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			escaped = append(escaped, fmt.Sprintf("%s: %v", b.name, err))
			after = "NOT CAUGHT"
		}
		table = append(table, fmt.Sprintf("| %s | %s | %s | %s |", b.name, b.file, b.by, after))
		fmt.Println(table[len(table)-1])
	}
	if *report != "" {
		if err := os.WriteFile(*report, []byte(text(head, table)), 0o644); err != nil {
			return err
		}
	}
	if len(escaped) > 0 {
		return fmt.Errorf("%d of %d bugs got away:\n%s", len(escaped), len(table)-2, strings.Join(escaped, "\n"))
	}
	return nil
}

// text returns the report.
func text(head string, table []string) string {
	return "# Planted bugs\n\n" + head + "\n\n" + strings.Join(table, "\n") + "\n"
}

func head() string {
	return provenance.Head(strings.Join(append([]string{"go run ./internal/lab/planted"}, os.Args[1:]...), " "), time.Now())
}

// repository returns the folder of go.work.
func repository() (string, error) {
	out, err := exec.Command("go", "env", "GOWORK").Output()
	if err != nil {
		return "", fmt.Errorf("go env: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// plant runs the check on a build with the bug, and returns how long or how many schedules the check needed to
// find it.
func (b bug) plant(ctx context.Context, root string) (after string, err error) {
	folder, err := os.MkdirTemp("", "planted")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	overlay, err := b.overlay(root, folder)
	if err != nil {
		return "", err
	}
	began := time.Now()
	out, err := b.by.test(ctx, root, "-overlay="+overlay)
	took := time.Since(began).Round(time.Second)
	switch {
	case err == nil:
		return "", errors.New("the check passes")
	case !bytes.Contains(out, []byte("--- FAIL")) && !bytes.Contains(out, []byte("panic: test timed out")):
		return "", fmt.Errorf("the check did not run: %w\n%s", err, out)
	case b.by == simulation, b.by == enumerated:
		return schedules(out)
	}
	return fmt.Sprintf("%v, with its build", took), nil
}

var found = regexp.MustCompile(`found after (\d+) schedules`)

func schedules(out []byte) (string, error) {
	n := found.FindSubmatch(out)
	if n == nil {
		return "", fmt.Errorf("the simulation failed without a finding:\n%s", out)
	}
	return string(n[1]) + " schedules", nil
}

// together is one check with all tests that the bugs of a package need.
func together(pkg string, bugs []bug) check {
	var runs []string
	for _, b := range bugs {
		if b.by.pkg == pkg && !slices.Contains(runs, b.by.run) {
			runs = append(runs, b.by.run)
		}
	}
	return check{pkg, strings.Join(runs, "|")}
}

// passes fails if the check finds something without a bug, because such a check proves nothing.
func (c check) passes(ctx context.Context, root string) error {
	if out, err := c.test(ctx, root); err != nil {
		return fmt.Errorf("the check fails without the bug: %w\n%s", err, out)
	}
	return nil
}

// overlay writes the changed file and the overlay description for the go command into the folder.
func (b bug) overlay(root, folder string) (string, error) {
	text, err := b.changed(root)
	if err != nil {
		return "", err
	}
	changed := filepath.Join(folder, "changed"+filepath.Ext(b.file))
	if err := os.WriteFile(changed, text, 0o644); err != nil {
		return "", err
	}
	replace := map[string]map[string]string{"Replace": {filepath.Join(root, b.file): changed}}
	list, err := json.Marshal(replace)
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(folder, "overlay.json")
	return overlay, os.WriteFile(overlay, list, 0o644)
}

// changed returns the file with the bug.
func (b bug) changed(root string) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(root, b.file))
	if err != nil {
		return nil, err
	}
	if n := bytes.Count(text, []byte(b.old)); n != 1 {
		return nil, fmt.Errorf("%s has %d places like %q, want 1", b.file, n, b.old)
	}
	return bytes.Replace(text, []byte(b.old), []byte(b.new), 1), nil
}

// test runs the check, with additional arguments for the go command.
func (c check) test(ctx context.Context, root string, more ...string) ([]byte, error) {
	args := append([]string{"test", "-vet=off", "-count=1"}, more...)
	switch c {
	case simulation:
		args = append(args, "./internal/lab/sim", "-run=^TestSchedules$", "-timeout=10m", fmt.Sprintf("-seeds=%d", *seeds), "-most=1")
	case enumerated:
		args = append(args, c.pkg, "-run="+c.run, "-timeout=30m", "-pairs", "-most=1")
	default:
		args = append(args, c.pkg, "-run="+c.run, "-timeout=10m")
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "HOLDFAST_REQUIRE_SERVERS=1")
	return cmd.CombinedOutput()
}

func (c check) String() string {
	switch c {
	case simulation:
		return "simulation"
	case enumerated:
		return "enumerated schedules"
	}
	return strings.TrimPrefix(c.pkg, "./") + ", " + strings.Trim(c.run, "^$")
}
