package exchange

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// problems finds the word and the HTTP status of each problem in the guide.
var problems = regexp.MustCompile(`(?m)^## ([A-Z_]+)\n\n([0-9]{3})\.`)

// TestTables checks that the tables of errors contain every problem with its code.
func TestTables(t *testing.T) {
	t.Parallel()
	guide := read(t, "../../../../examples/guides/problems.md")
	readme := read(t, "../../README.md")
	docs := read(t, "../../idempotencygrpc/doc.go") + read(t, "../../ratelimitgrpc/doc.go")
	found := problems.FindAllStringSubmatch(guide, -1)
	if headings := strings.Count(guide, "\n## "); len(found) != headings {
		t.Fatalf("%d problems with a status under %d headings", len(found), headings)
	}
	for _, p := range found {
		if p[1] == "INVALID_REQUEST" { // an incomplete body: a message is always complete
			continue
		}
		status, err := strconv.Atoi(p[2])
		if err != nil {
			t.Fatal(err)
		}
		code := codeOf(status, p[1]).String()
		if !regexp.MustCompile(`(?m)^\| ` + code + ` \|.*` + "`" + p[1] + "`").MatchString(readme) {
			t.Errorf("README.md has no row %s with %s", code, p[1])
		}
		if !regexp.MustCompile(`(?m)^//\t` + code + ` +` + p[1] + ` `).MatchString(docs) {
			t.Errorf("no doc.go has a row %s %s", code, p[1])
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
