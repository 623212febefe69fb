// Package observability tests the files for Prometheus and Grafana in modules/operator/observability against the metrics
// that the code exports: the dashboard, the rules, and the rules' tests for promtool. At night a Prometheus scrapes the
// shop, and promtool runs the tests of the rules.
package observability

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9/logging"
	"go.yaml.in/yaml/v3"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	logging.Disable() // of go-redis, because its server is unreachable in the exercises
	code := testenv.Run(m)
	shop.Remove()
	os.Exit(code)
}

// folder is where the files are kept.
const folder = "../../../modules/operator/observability"

// dashboard has the parts of dashboard.json that the tests use.
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
	runbooks := map[string]string{}
	for _, text := range strings.Split(string(readFile(t, "runbooks.md")), "\n## ")[1:] {
		name, text, _ := strings.Cut(text, "\n")
		runbooks[name] = text
	}
	for _, r := range readRules(t) {
		if url := r.Annotations["runbook_url"]; !strings.HasSuffix(url, "/runbooks.md{{ end }}#"+strings.ToLower(r.Alert)) {
			t.Errorf("%s has the runbook %s", r.Alert, url)
		}
		for _, label := range []string{"Means", "Look", "Fix", "False alarm"} {
			if !strings.Contains("\n"+runbooks[r.Alert], "\n- **"+label+"**: ") {
				t.Errorf("the runbook of %s has no label %q", r.Alert, label)
			}
		}
		delete(runbooks, r.Alert)
	}
	for name := range runbooks {
		t.Errorf("the runbook %s belongs to no alert", name)
	}
}

// Each alert has a test in which it fires, and one in which it does not.
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

// everyExpr returns all expressions by their location.
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
		t.Errorf("read %d expressions, want more from all files", len(all))
	}
	return all
}

var (
	// rare matches queries without data in a healthy shop.
	rare = regexp.MustCompile(`txretry_(failures|refused)|outbox_(failed|given_back|stale_leases)|outcome=~"retried\|dead"|_dead_letters|_backlog|_parked_|` +
		`_lost_sessions|_stuck|idempotency_fallbacks|ratelimit_leased|_pruned`)
	// ofServers matches queries that have data on real servers only.
	ofServers = regexp.MustCompile(`outbox_window_fill|ratelimit_(decisions|duration)`)
)

const repository = "../../.."

var (
	documented = regexp.MustCompile("`(holdfast\\.[a-z_]+\\.[a-z_.]+)`")
	scaledBy   = regexp.MustCompile(`metric: \{name: (\w+)\}`)
)

// checkDocuments checks that every metric named in a document or in the Kubernetes files is exported.
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
		t.Errorf("found %d names of metrics in the documents, want names of all packages", names)
	}
}

// use is a metric in an expression, with its labels and their values.
type use struct {
	metric string // a name, or a pattern of names
	labels map[string][]string
}

var (
	selector  = regexp.MustCompile(`([a-z_][a-z0-9_]*)?\{([^}]*)\}|\b(?:holdfast|process|go)_[a-z0-9_]+`)
	matcher   = regexp.MustCompile(`(\w+)(=~|!~|!=|=)"([^"]*)"`)
	grouping  = regexp.MustCompile(`\b(?:by|on) \(([^)]*)\)`)
	plainText = regexp.MustCompile(`^[\w. ]+(\|[\w. ]+)*$`)
)

// usesOf parses the expressions of this package. They are simple: no string contains a brace.
func usesOf(expr string) []use {
	var uses []use
	for _, found := range selector.FindAllStringSubmatch(grouping.ReplaceAllString(expr, ""), -1) {
		u := use{metric: found[1], labels: map[string][]string{}}
		if found[2] == "" {
			u.metric = strings.TrimSuffix(found[0], "{}")
		}
		for _, m := range matcher.FindAllStringSubmatch(found[2], -1) {
			if m[1] == "__name__" {
				u.metric = m[3]
				continue
			}
			var values []string
			if m[2] == "=" || m[2] == "=~" && plainText.MatchString(m[3]) {
				values = strings.Split(m[3], "|")
			}
			u.labels[m[1]] = values
		}
		uses = append(uses, u)
	}
	return uses
}

// groupsOf returns the labels that an expression groups by.
func groupsOf(expr string) []string {
	var all []string
	for _, found := range grouping.FindAllStringSubmatch(expr, -1) {
		for name := range strings.SplitSeq(found[1], ",") {
			all = append(all, strings.TrimSpace(name))
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// promtool runs promtool in a folder. It is installed at night only.
func promtool(t *testing.T, dir string, args ...string) (string, error) {
	t.Helper()
	testenv.Nightly(t, "promtool is installed for the night")
	if _, err := exec.LookPath("promtool"); err != nil {
		testenv.Missing(t, "promtool is not installed (the Debian package prometheus)")
	}
	cmd := exec.CommandContext(t.Context(), "promtool", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Prometheus accepts the rules, and they fire or stay silent as their tests require.
func TestRules(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"check", "rules", "rules.yaml"}, {"test", "rules", "rules_test.yaml"}} {
		if out, err := promtool(t, folder, args...); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
}
