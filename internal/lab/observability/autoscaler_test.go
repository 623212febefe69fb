package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/template"

	"go.yaml.in/yaml/v3"
)

// deployed is where the manifests of the shop are.
const deployed = "../../../examples/reservation/deploy"

// adapterRule is a rule of prometheus-adapter for an external metric.
type adapterRule struct {
	SeriesQuery  string `yaml:"seriesQuery"`
	MetricsQuery string `yaml:"metricsQuery"`
	Resources    struct {
		Overrides map[string]struct{ Resource string }
	}
}

// series is the metric that the rule is about.
func (r adapterRule) series() string {
	name, _, _ := strings.Cut(r.SeriesQuery, "{")
	return name
}

// query is what the adapter asks Prometheus for an autoscaler of a namespace.
func (r adapterRule) query(t *testing.T, namespace string) string {
	t.Helper()
	query, err := template.New("").Delims("<<", ">>").Parse(r.MetricsQuery)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	err = query.Execute(&b, map[string]string{
		"Series": r.series(), "LabelMatchers": fmt.Sprintf("namespace=%q", namespace), "GroupBy": "",
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// externalMetric is one that an autoscaler reads.
type externalMetric struct {
	Metric struct{ Name string }
	Target struct{ Type, Value string }
}

// The autoscaler of the relays reads a metric that the adapter has, and however many relays report the same lag, it is
// given that lag, of its own namespace.
func TestAutoscalerIsGivenTheLag(t *testing.T) {
	t.Parallel()
	metric, rule := autoscaled(t), ruleOfAdapter(t)
	if rule.series() != metric.Metric.Name {
		t.Errorf("the autoscaler reads %q, the adapter has %q", metric.Metric.Name, rule.series())
	}
	if metric.Target.Type != "Value" { // AverageValue is the metric of each pod
		t.Errorf("the target is %+v", metric.Target)
	}
	if rule.Resources.Overrides["namespace"].Resource != "namespace" {
		t.Errorf("the adapter does not know a namespace by its label: %+v", rule.Resources)
	}
	t.Run("promtool", func(t *testing.T) {
		for _, relays := range []int{1, 2, 8} {
			wantLag(t, rule, relays)
		}
	})
}

// wantLag has promtool evaluate the query over the series of so many relays.
func wantLag(t *testing.T, rule adapterRule, relays int) {
	t.Helper()
	var b strings.Builder
	b.WriteString("tests:\n  - interval: 1m\n    input_series:\n")
	for i := range relays {
		fmt.Fprintf(&b, "      - {series: %s, values: '0 5 5'}\n", quoted(fmt.Sprintf(`%s{namespace="shop",pod="relay-%d"}`, rule.series(), i)))
	}
	fmt.Fprintf(&b, "      - {series: %s, values: '0 60 60'}\n", quoted(rule.series()+`{namespace="other",pod="relay-0"}`))
	fmt.Fprintf(&b, "    promql_expr_test:\n      - expr: %s\n        eval_time: 2m\n        exp_samples: [{labels: '{}', value: 5}]\n",
		quoted(rule.query(t, "shop")))
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "lag_test.yaml"), []byte(b.String()))
	if out, err := promtool(t, dir, "test", "rules", "lag_test.yaml"); err != nil {
		t.Errorf("%d relays: %v\n%s", relays, err, out)
	}
}

func ruleOfAdapter(t *testing.T) adapterRule {
	t.Helper()
	var values struct {
		Rules struct{ External []adapterRule }
	}
	readYAML(t, "prometheus-adapter.yaml", func(d *yaml.Decoder) error { return d.Decode(&values) })
	if len(values.Rules.External) != 1 {
		t.Fatalf("%d rules", len(values.Rules.External))
	}
	return values.Rules.External[0]
}

// autoscaled returns the only metric of the only autoscaler.
func autoscaled(t *testing.T) externalMetric {
	t.Helper()
	var found []externalMetric
	readYAML(t, "kubernetes.yaml", func(d *yaml.Decoder) error {
		for {
			var object struct {
				Kind string
				Spec struct {
					Metrics []struct{ External externalMetric }
				}
			}
			err := d.Decode(&object)
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			for _, m := range object.Spec.Metrics {
				found = append(found, m.External)
			}
		}
	})
	if len(found) != 1 {
		t.Fatalf("%d metrics", len(found))
	}
	return found[0]
}

func readYAML(t *testing.T, name string, read func(*yaml.Decoder) error) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(deployed, name))
	if err == nil {
		err = read(yaml.NewDecoder(bytes.NewReader(text)))
	}
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}
