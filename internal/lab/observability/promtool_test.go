package observability

import (
	"os/exec"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// promtool runs it in a folder, at night: then it is installed.
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

// Prometheus takes the rules, and they fire and stay silent as their tests say.
func TestRules(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"check", "rules", "rules.yaml"}, {"test", "rules", "rules_test.yaml"}} {
		if out, err := promtool(t, folder, args...); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
}
