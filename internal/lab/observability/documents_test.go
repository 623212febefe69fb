package observability

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const repository = "../../.."

var (
	documented = regexp.MustCompile("`(holdfast\\.[a-z_]+\\.[a-z_.]+)`")
	scaledBy   = regexp.MustCompile(`metric: \{name: (\w+)\}`)
)

// checkDocuments: what documents call a metric is one, and so is what Kubernetes scales by.
func checkDocuments(t *testing.T, known exported) {
	t.Helper()
	names := 0
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && entry.Name() != ".." {
			return fs.SkipDir
		}
		if ending := filepath.Ext(path); ending != ".md" && ending != ".yaml" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, found := range documented.FindAllStringSubmatch(string(text), -1) {
			names++
			name := transport.ReplaceAllString(strings.ReplaceAll(found[1], ".", "_"), "holdfast_inbox_.+_")
			if len(known.named(name+"(_total|_seconds|_ratio|_seconds_count)?")) == 0 {
				t.Errorf("%s names %s, which nothing exports", path, found[1])
			}
		}
		for _, found := range scaledBy.FindAllStringSubmatch(string(text), -1) {
			names++
			if len(known.named(found[1])) == 0 {
				t.Errorf("%s scales by %s, which nothing exports", path, found[1])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if names < 10 {
		t.Errorf("found %d names of metrics in the documents, want those of all packages", names)
	}
}
