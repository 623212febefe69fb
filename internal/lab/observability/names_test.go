package observability

import (
	"fmt"
	"regexp"
	"slices"
	"testing"
)

// ofPrometheus are the labels that a scrape adds, and that of the buckets.
var ofPrometheus = []string{"job", "instance", "le"}

// Every metric, label and value that the dashboard, the rules, their tests and the documents name is exported by the code.
func TestNames(t *testing.T) {
	t.Parallel()
	known := exercise(t)
	for where, expr := range everyExpr(t) {
		for _, problem := range known.problems(expr) {
			t.Errorf("%s: %s in %s", where, problem, expr)
		}
	}
	for _, test := range readRuleTests(t) {
		for _, s := range test.InputSeries {
			for _, problem := range known.misnamed(s.Series) {
				t.Errorf("example %q: %s in %s", test.Name, problem, s.Series)
			}
		}
	}
	checkDocuments(t, known)
}

// problems tells what an expression names that is not exported.
func (e exported) problems(expr string) []string {
	var found []string
	grouped := map[string]bool{}
	for _, u := range usesOf(expr) {
		if u.metric == "up" {
			continue
		}
		metrics := e.named(u.metric)
		if len(metrics) == 0 {
			found = append(found, "nothing exports "+u.metric)
		}
		for _, values := range metrics {
			for label := range values {
				grouped[label] = true
			}
		}
		if len(metrics) > 0 {
			found = append(found, u.missing(metrics)...)
		}
	}
	for _, label := range groupsOf(expr) {
		if len(grouped) > 0 && !grouped[label] && !slices.Contains(ofPrometheus, label) {
			found = append(found, "no metric has the label "+label)
		}
	}
	return found
}

// transport is what differs between the metrics of consumers. One engine exports them all.
var transport = regexp.MustCompile(`^holdfast_inbox_(amqp|redis)_`)

// misnamed tells what a series names that is not exported. Its values are free.
func (e exported) misnamed(series string) []string {
	for _, u := range usesOf(series) {
		for label := range u.labels {
			u.labels[label] = nil
		}
		if metrics := e.named(transport.ReplaceAllString(u.metric, "holdfast_inbox_.+_")); len(metrics) > 0 {
			return u.missing(metrics)
		}
		if u.metric != "up" {
			return []string{"nothing exports " + u.metric}
		}
	}
	return nil
}

// missing tells which labels and values none of the metrics has.
func (u use) missing(metrics []map[string]map[string]bool) []string {
	var found []string
	for label, values := range u.labels {
		if slices.Contains(ofPrometheus, label) {
			continue
		}
		seen := map[string]bool{}
		has := false
		for _, m := range metrics {
			for value := range m[label] {
				has, seen[value] = true, true
			}
		}
		if !has {
			found = append(found, u.metric+" has no label "+label)
			continue
		}
		for _, value := range values {
			if !seen[value] {
				found = append(found, fmt.Sprintf("%s has no %s=%q", u.metric, label, value))
			}
		}
	}
	return found
}

// named returns the metrics of a name or a pattern.
func (e exported) named(pattern string) []map[string]map[string]bool {
	var found []map[string]map[string]bool
	whole := regexp.MustCompile("^(?:" + pattern + ")$")
	for name, labels := range e {
		if whole.MatchString(name) {
			found = append(found, labels)
		}
	}
	return found
}
