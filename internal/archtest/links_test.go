package archtest_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	link  = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	block = regexp.MustCompile("(?s)```.*?```")
)

// TestLinks: what documents link to within the repository exists.
func TestLinks(t *testing.T) {
	t.Parallel()
	links := 0
	for _, file := range append(files(t, ".md"), "../../llms.txt") {
		for _, found := range link.FindAllStringSubmatch(block.ReplaceAllString(read(t, file), ""), -1) {
			target, _, _ := strings.Cut(found[1], "#")
			if target == "" || strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			links++
			if _, err := os.Stat(filepath.Join(filepath.Dir(file), target)); err != nil {
				t.Errorf("%s links %s, which does not exist", file, target)
			}
		}
	}
	if links == 0 {
		t.Error("no document has links")
	}
}
