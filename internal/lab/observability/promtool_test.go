package main

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Prometheus takes the rules, and they fire and stay silent as their tests say.
func TestRules(t *testing.T) {
	t.Parallel()
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		testenv.Missing(t, "promtool is not installed (the Debian package prometheus)")
	}
	for _, args := range [][]string{{"check", "rules", "rules.yaml"}, {"test", "rules", "rules_test.yaml"}} {
		cmd := exec.CommandContext(t.Context(), promtool, args...)
		cmd.Dir = folder
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
}

// A rule that does not do what its test says is found.
func TestRulesThatAreWrong(t *testing.T) {
	t.Parallel()
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		testenv.Missing(t, "promtool is not installed (the Debian package prometheus)")
	}
	for _, a := range alerts {
		t.Run(a.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			deaf := a
			deaf.expr = "vector(0) > 1"
			writeFile(t, filepath.Join(dir, "rules.yaml"), rulesYAML([]alert{deaf}))
			writeFile(t, filepath.Join(dir, "rules_test.yaml"), rulesTestYAML([]alert{a}))
			cmd := exec.CommandContext(t.Context(), promtool, "test", "rules", "rules_test.yaml")
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err == nil {
				t.Errorf("an alert that never fires passes:\n%s", out)
			}
		})
	}
}
