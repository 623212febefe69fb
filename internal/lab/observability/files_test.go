package observability

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// folder is where the files are kept.
const folder = "../../../modules/operator/observability"

// dashboard is what the tests read of dashboard.json.
type dashboard struct {
	Panels []struct {
		Title   string
		Targets []struct{ Expr string }
	}
	Templating struct {
		List []struct{ Query string }
	}
}

// rule is an alert of rules.yaml.
type rule struct {
	Alert       string
	Expr        string
	Annotations map[string]string
}

// ruleTest is a case of rules_test.yaml.
type ruleTest struct {
	Name        string
	InputSeries []struct{ Series string } `yaml:"input_series"`
	Alerts      []struct {
		Alertname string
		Expected  []struct{} `yaml:"exp_alerts"`
	} `yaml:"alert_rule_test"`
}

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	if err := json.Unmarshal(readFile(t, "dashboard.json"), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

func readRules(t *testing.T) []rule {
	t.Helper()
	var file struct {
		Groups []struct{ Rules []rule }
	}
	if err := yaml.Unmarshal(readFile(t, "rules.yaml"), &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Groups) != 1 || len(file.Groups[0].Rules) == 0 {
		t.Fatalf("rules.yaml has %d groups, want one with rules", len(file.Groups))
	}
	return file.Groups[0].Rules
}

func readRuleTests(t *testing.T) []ruleTest {
	t.Helper()
	var file struct{ Tests []ruleTest }
	if err := yaml.Unmarshal(readFile(t, "rules_test.yaml"), &file); err != nil {
		t.Fatal(err)
	}
	return file.Tests
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// Each alert has a runbook, and each runbook an alert.
func TestRunbooks(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob(filepath.Join(folder, "runbooks", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	var named []string
	for _, r := range readRules(t) {
		named = append(named, r.Alert)
		if url := r.Annotations["runbook_url"]; !strings.HasSuffix(url, "/"+r.Alert+".md") {
			t.Errorf("%s has the runbook %s", r.Alert, url)
		}
	}
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".md")
		at := slices.Index(named, name)
		if at < 0 {
			t.Errorf("%s is of no alert", path)
			continue
		}
		named = slices.Delete(named, at, at+1)
		text := readFile(t, filepath.Join("runbooks", name+".md"))
		for _, heading := range []string{"# " + name + "\n", "## What it means\n", "## How to look\n", "## How to mend\n", "## A false alarm\n"} {
			if !strings.Contains("\n"+string(text), "\n"+heading) {
				t.Errorf("%s has no heading %q", path, strings.TrimSpace(heading))
			}
		}
	}
	if len(named) > 0 {
		t.Errorf("no runbook for %v", named)
	}
}

// Each alert is tested to fire and to stay silent.
func TestExamples(t *testing.T) {
	t.Parallel()
	fires, silent := map[string]int{}, map[string]int{}
	for _, test := range readRuleTests(t) {
		for _, a := range test.Alerts {
			if len(a.Expected) > 0 {
				fires[a.Alertname]++
			} else {
				silent[a.Alertname]++
			}
		}
	}
	for _, r := range readRules(t) {
		if fires[r.Alert] == 0 || silent[r.Alert] == 0 {
			t.Errorf("%s: %d examples fire, and %d do not; want one of each", r.Alert, fires[r.Alert], silent[r.Alert])
		}
	}
}

// everyExpr returns all expressions by where they stand.
func everyExpr(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	d := readDashboard(t)
	for i, v := range d.Templating.List {
		all[fmt.Sprintf("dashboard, variable %d", i+1)] = v.Query
	}
	for n, p := range d.Panels { // two may have one title
		for i, target := range p.Targets {
			all[fmt.Sprintf("dashboard, panel %d, %s, query %d", n+1, p.Title, i+1)] = target.Expr
		}
	}
	for _, r := range readRules(t) {
		all["alert "+r.Alert] = r.Expr
	}
	if len(all) < 50 {
		t.Errorf("read %d expressions, want those of all files", len(all))
	}
	return all
}

var (
	// rare are the queries for which a shop that is well has no data.
	rare = regexp.MustCompile(`txretry_failures|outbox_(failed|given_back|stale_leases)|outcome=~"retried\|dead"|_dead_letters|_parked_|` +
		`_lost_sessions|_stuck|idempotency_fallbacks|ratelimit_leased|_pruned`)
	// ofServers are the queries for which a shop has data on real servers only.
	ofServers = regexp.MustCompile(`outbox_window_fill|ratelimit_(decisions|duration)`)
)
