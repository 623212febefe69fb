package archtest_test

import (
	"regexp"
	"strings"
	"testing"
)

var (
	testName = regexp.MustCompile(`\bTest[A-Z]\w*`)
	testFunc = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
)

// TestReliabilityNamesTests: every test that the page on reliability names is there, and every fault has one.
func TestReliabilityNamesTests(t *testing.T) {
	t.Parallel()
	declared := map[string]bool{}
	for _, file := range files(t, "_test.go") {
		for _, found := range testFunc.FindAllStringSubmatch(read(t, file), -1) {
			declared[found[1]] = true
		}
	}
	_, faults, ok := strings.Cut(read(t, "../lab/reliability.md"), "\n| fault | found by | test |\n|---|---|---|\n")
	if !ok {
		t.Fatal("the page has no table of faults")
	}
	faults, _, _ = strings.Cut(faults, "\n\n")
	for row := range strings.Lines(faults) {
		names := testName.FindAllString(row, -1)
		if len(names) == 0 {
			t.Errorf("no test for %s", row)
		}
		for _, name := range names {
			if !declared[name] {
				t.Errorf("there is no %s, for %s", name, row)
			}
		}
	}
}
