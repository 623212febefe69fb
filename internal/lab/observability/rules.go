package main

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// runbooks is where the runbooks are, unless the Prometheus has an external label runbooks.
const runbooks = "https://github.com/holdfast-go/holdfast/blob/main/examples/operator/observability/runbooks"

const generatedNote = "# Written by internal/lab/observability; change it there.\n"

// rulesYAML returns the file of rules.
func rulesYAML(alerts []alert) []byte {
	var b strings.Builder
	b.WriteString(generatedNote + "groups:\n  - name: holdfast\n    rules:\n")
	for _, a := range alerts {
		fmt.Fprintf(&b, "      - alert: %s\n        expr: %s\n        for: %s\n", a.name, quoted(a.expr), a.lasting)
		fmt.Fprintf(&b, "        labels: {severity: %s}\n        annotations:\n", a.severity)
		for _, text := range a.annotations("{{ with $externalLabels.runbooks }}{{ . }}{{ else }}" + runbooks + "{{ end }}") {
			fmt.Fprintf(&b, "          %s: %s\n", text.name, quoted(text.value))
		}
	}
	return []byte(b.String())
}

// rulesTestYAML returns what promtool test rules runs.
func rulesTestYAML(alerts []alert) []byte {
	var b strings.Builder
	b.WriteString(generatedNote + "rule_files: [rules.yaml]\nevaluation_interval: 1m\ntests:\n")
	for _, a := range alerts {
		for _, e := range a.examples {
			fmt.Fprintf(&b, "  - name: %s\n    interval: 1m\n    input_series:\n", quoted(a.name+": "+e.name))
			for _, s := range e.series {
				fmt.Fprintf(&b, "      - {series: %s, values: %s}\n", quoted(s.name), quoted(s.values))
			}
			fmt.Fprintf(&b, "    alert_rule_test:\n      - eval_time: %s\n        alertname: %s\n", e.at, a.name)
			if len(e.fires) == 0 {
				b.WriteString("        exp_alerts: []\n")
				continue
			}
			b.WriteString("        exp_alerts:\n")
			for _, fired := range e.fires {
				b.WriteString(a.expected(fired))
			}
		}
	}
	return []byte(b.String())
}

// expected is an alert as promtool wants it, with all labels and annotations.
func (a alert) expected(fired labels) string {
	var b strings.Builder
	fmt.Fprintf(&b, "          - exp_labels: {severity: %s", a.severity)
	for _, name := range slices.Sorted(maps.Keys(fired)) {
		fmt.Fprintf(&b, ", %s: %s", name, quoted(fired[name]))
	}
	b.WriteString("}\n            exp_annotations:\n")
	for _, text := range a.annotations(runbooks) {
		fmt.Fprintf(&b, "              %s: %s\n", text.name, quoted(fired.in(text.value)))
	}
	return b.String()
}

// annotation is one text of an alert.
type annotation struct{ name, value string }

func (a alert) annotations(base string) []annotation {
	return []annotation{
		{"summary", a.summary}, {"description", a.description}, {"runbook_url", base + "/" + a.name + ".md"},
	}
}

var labelInText = regexp.MustCompile(`\{\{ \$labels\.(\w+) \}\}`)

// in writes the values of the labels into a text that names them.
func (l labels) in(text string) string {
	return labelInText.ReplaceAllStringFunc(text, func(found string) string {
		return l[labelInText.FindStringSubmatch(found)[1]]
	})
}

// quoted is a text in YAML's single quotes, in which only they have a meaning.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
