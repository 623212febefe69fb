package observability

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// found returns what the only match of an expression in a manifest of the shop captures.
func found(t *testing.T, manifest, expression string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../../examples/reservation/deploy", manifest))
	if err != nil {
		t.Fatal(err)
	}
	all := regexp.MustCompile(expression).FindAllStringSubmatch(string(text), -1)
	if len(all) != 1 {
		t.Fatalf("%s has %d matches of %s", manifest, len(all), expression)
	}
	return all[0][1:]
}

// quoted is a text in YAML's single quotes, in which only they have a meaning.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

// The autoscaler of the relays reads the metric that the adapter has. However many relays report the same lag, the adapter
// returns that lag, of the namespace that it is asked for.
func TestAutoscalerIsGivenTheLag(t *testing.T) {
	t.Parallel()
	// The type AverageValue would be of the metric of each pod.
	metric := found(t, "kubernetes.yaml", `metric: \{name: (\w+)\}\s+target: \{type: Value, value: "\d+"\}`)[0]
	rule := found(t, "prometheus-adapter.yaml",
		`seriesQuery: '(\w+)\{namespace!=""\}'\s+resources: \{overrides: \{namespace: \{resource: namespace\}\}\}\s+metricsQuery: '([^']*)'`)
	if rule[0] != metric {
		t.Errorf("the autoscaler reads %q, the adapter has %q", metric, rule[0])
	}
	if !strings.HasPrefix(rule[1], "max(") {
		t.Errorf("%s grows with each relay", rule[1])
	}
	query := strings.NewReplacer("<<.Series>>", metric, "<<.LabelMatchers>>", `namespace="shop"`).Replace(rule[1])
	for _, relays := range []int{1, 2, 8} {
		t.Run(fmt.Sprint(relays, " relays"), func(t *testing.T) {
			var b strings.Builder
			b.WriteString("tests:\n  - interval: 1m\n    input_series:\n")
			for i := range relays {
				fmt.Fprintf(&b, "      - {series: %s, values: '0 5 5'}\n", quoted(fmt.Sprintf(`%s{namespace="shop",pod="relay-%d"}`, metric, i)))
			}
			fmt.Fprintf(&b, "      - {series: %s, values: '0 60 60'}\n", quoted(metric+`{namespace="other",pod="relay-0"}`))
			fmt.Fprintf(&b, "    promql_expr_test:\n      - expr: %s\n        eval_time: 2m\n        exp_samples: [{labels: '{}', value: 5}]\n", quoted(query))
			dir := t.TempDir()
			writeFile(t, filepath.Join(dir, "lag_test.yaml"), []byte(b.String()))
			if out, err := promtool(t, dir, "test", "rules", "lag_test.yaml"); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
