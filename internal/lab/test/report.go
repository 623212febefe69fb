package main

import (
	"bufio"
	"cmp"
	_ "embed"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

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
