package archtest_test

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// ownCode finds the codes of problems: in literals, in constants and in methods.
var ownCode = regexp.MustCompile(`(?:Code: +|Code[A-Z][A-Za-z]+ += |Code\(\) string +\{ return )"([A-Z][A-Z_]+)"`)

// TestProblems: the types of problems link to headings that are there, and each heading is a code.
func TestProblems(t *testing.T) {
	t.Parallel()
	codes := map[string]bool{}
	for _, file := range files(t, ".go") {
		if strings.HasSuffix(file, "_test.go") || strings.Contains(file, "/examples/") || strings.Contains(file, "/internal/") {
			continue
		}
		for _, found := range ownCode.FindAllStringSubmatch(read(t, file), -1) {
			codes[found[1]] = true
		}
	}
	headings := map[string]bool{}
	for line := range strings.Lines(read(t, "../../examples/guides/problems.md")) {
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			headings[strings.TrimSpace(heading)] = true
		}
	}
	if !maps.Equal(codes, headings) {
		t.Errorf("codes %v, headings of problems.md %v", slices.Sorted(maps.Keys(codes)), slices.Sorted(maps.Keys(headings)))
	}
}
