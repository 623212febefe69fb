// Command observability writes what an operator gives to Prometheus and Grafana: the dashboard, the rules, and the
// tests of the rules for promtool, into examples/operator/observability. Run it from the root of the repository:
//
//	go run ./internal/lab/observability
//
// Its tests hold every query to the metrics that the code exports.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	dir := flag.String("dir", filepath.Join("examples", "operator", "observability"), "where to write")
	flag.Parse()
	if err := write(*dir); err != nil {
		fmt.Fprintln(os.Stderr, "observability:", err)
		os.Exit(1)
	}
}

// write writes the generated files into a folder that exists.
func write(dir string) error {
	files, err := generated()
	if err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// generated returns the files by name.
func generated() (map[string][]byte, error) {
	dashboard, err := dashboardJSON(rows)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{
		"dashboard.json":  dashboard,
		"rules.yaml":      rulesYAML(alerts),
		"rules_test.yaml": rulesTestYAML(alerts),
	}, nil
}
