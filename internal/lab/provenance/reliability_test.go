package provenance_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

const lab = ".."

// link matches a link to a report. After a colon, its text names a section of the report.
var link = regexp.MustCompile(`^\[[^:]*(?:: (.*))?\]\((.*)\)$`)

// reports are the reports that the table must list.
var reports = []string{
	"chaos/report-nats.md", "chaos/report.md", "clusters/report.md", "matrix/report.md", "models/report.md", "performance.md", "planted/report.md", "sim/pairs.md", "sim/report.md",
	"soak/report.md dedup", "soak/report.md shop", "soak/report.md snapshot", "soak/report.md waiting",
}

// TestReliability_namesReports compares the table in reliability.md with its reports: they contain the command, date and
// commit. Size and findings are prose.
func TestReliability_namesReports(t *testing.T) {
	t.Parallel()
	var named []string
	for _, cells := range table(t, "| report | command |") {
		at := link.FindStringSubmatch(cells[0])
		if at == nil {
			t.Errorf("%s is not a link to a report", cells[0])
			continue
		}
		named = append(named, strings.TrimSpace(at[2]+" "+at[1]))
		report := section(read(t, at[2]), at[1])
		for _, said := range cells[1:4] { // command, date and commit
			if said = strings.Trim(said, "`"); said != "–" && !strings.Contains(report, said) {
				t.Errorf("%s does not contain %q", cells[0], said)
			}
		}
	}
	slices.Sort(named)
	if !slices.Equal(named, reports) {
		t.Errorf("the table has the reports %q, want %q", named, reports)
	}
}

// section returns the section of a report with a heading: the whole report without a name, "" if there is no such heading.
func section(report, name string) string {
	if name == "" {
		return report
	}
	_, rest, _ := strings.Cut(report, "\n## "+name+"\n")
	text, _, _ := strings.Cut(rest, "\n## ")
	return text
}

// table returns the cells of the rows under a heading in reliability.md.
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
