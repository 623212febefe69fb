package provenance_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const lab = ".."

var link = regexp.MustCompile(`^\[.*\]\((.*)\)$`)

// TestWhatWasRun holds the table of reliability.md to the reports that it names.
func TestWhatWasRun(t *testing.T) {
	t.Parallel()
	rows := 0
	for _, cells := range table(t, "| report | command |") {
		rows++
		at := link.FindStringSubmatch(cells[0])
		if at == nil {
			t.Errorf("%s is no link to a report", cells[0])
			continue
		}
		report := read(t, at[1])
		for _, said := range cells[1:4] { // command, date and commit
			if said = strings.Trim(said, "`"); said != "–" && !strings.Contains(report, said) {
				t.Errorf("%s does not say %q", at[1], said)
			}
		}
	}
	if rows < 6 {
		t.Errorf("the table has %d rows, want one of each report", rows)
	}
}

// table has the cells of the rows under a heading in reliability.md.
func table(t *testing.T, heading string) (rows [][]string) {
	t.Helper()
	_, rest, found := strings.Cut(read(t, "reliability.md"), "\n"+heading)
	if !found {
		t.Fatalf("no table %q", heading)
	}
	for _, line := range strings.Split(rest, "\n")[2:] {
		if !strings.HasPrefix(line, "| ") {
			return rows
		}
		rows = append(rows, strings.Split(strings.Trim(line, "| "), " | "))
	}
	return rows
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(lab, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
