package archtest_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var goBlock = regexp.MustCompile("(?s)```go\n(.*?)```")

// TestDocs: the Go code of every document stands in a Go file of the repository, which the build compiles.
func TestDocs(t *testing.T) {
	t.Parallel()
	var code []string
	for _, file := range files(t, ".go") {
		code = append(code, normal(read(t, file)))
	}
	blocks := 0
	for _, file := range files(t, ".md") {
		for _, block := range goBlock.FindAllStringSubmatch(read(t, file), -1) {
			blocks++
			if !slices.ContainsFunc(code, func(c string) bool { return strings.Contains(c, normal(block[1])) }) {
				t.Errorf("this code of %s is in no Go file:\n%s", file, block[1])
			}
		}
	}
	if blocks == 0 {
		t.Error("the documents have no Go code")
	}
}

// files returns the repository's files with this ending.
func files(t *testing.T, ending string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := entry.Name(); entry.IsDir() && strings.HasPrefix(name, ".") && name != ".." {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, ending) {
			found = append(found, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
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
