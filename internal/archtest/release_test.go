package archtest_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestNestedModules: a release sets the version that every module for users requires.
func TestNestedModules(t *testing.T) {
	t.Parallel()
	var modules []string
	for _, used := range regexp.MustCompile(`(?m)^\t\./(.+)$`).FindAllStringSubmatch(read(t, "../../go.work"), -1) {
		if !strings.HasPrefix(used[1], "examples/") && !strings.HasPrefix(used[1], "internal/") {
			modules = append(modules, used[1])
		}
	}
	listed := regexp.MustCompile(`(?m)^NESTED +:= (.+)$`).FindStringSubmatch(read(t, "../../Makefile"))
	if len(listed) != 2 || !slices.Equal(modules, strings.Fields(listed[1])) {
		t.Errorf("the Makefile releases %q, go.work has %q", listed, modules)
	}
	for _, dir := range modules {
		if tag := "`" + dir + "/v1.2.3`"; !strings.Contains(read(t, "../../CONTRIBUTING.md"), tag) {
			t.Errorf("CONTRIBUTING.md does not tag %s", tag)
		}
	}
}
