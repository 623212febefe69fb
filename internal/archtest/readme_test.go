package archtest_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestReadme: the Go code of the README is code that compiles.
func TestReadme(t *testing.T) {
	t.Parallel()
	readme := read(t, "../../README.md")
	compiled := normal(read(t, "snippets_test.go"))
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(readme, -1)
	if len(blocks) == 0 {
		t.Fatal("the README has no Go code")
	}
	for _, block := range blocks {
		if !strings.Contains(compiled, normal(block[1])) {
			t.Errorf("this code of the README is not in snippets_test.go:\n%s", block[1])
		}
	}
	for _, snippet := range []any{writerSnippet, relaySnippet, inboxSnippet, middlewareSnippet, expirySnippet} {
		if snippet == nil {
			t.Error("a snippet is missing")
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// normal drops indentation, which differs inside a function.
func normal(code string) string {
	var lines []string
	for line := range strings.Lines(code) {
		lines = append(lines, strings.TrimSpace(line))
	}
	return strings.Join(lines, "\n")
}
