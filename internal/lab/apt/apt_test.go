package apt

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestInstall(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		before string // of the policy file; empty: none
		fails  bool
	}{
		{name: "no policy before"},
		{name: "policy kept", before: "#!/bin/sh\nexit 0\n"},
		{name: "policy kept after a failure", before: "#!/bin/sh\nexit 0\n", fails: true},
		{name: "policy removed after a failure", fails: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			policy, trace, apt := filepath.Join(dir, "policy"), filepath.Join(dir, "trace"), filepath.Join(dir, "apt-get")
			script := fmt.Sprintf("#!/bin/sh\n%s; echo \"$? $DEBIAN_FRONTEND $*\" >> %s\n", policy, trace)
			if tc.fails {
				script += "exit 100\n"
			}
			write(t, apt, script)
			if tc.before != "" {
				write(t, policy, tc.before)
			}
			err := install(t.Context(), []string{apt}, policy, commands([]string{"redis-server"}))
			if (err != nil) != tc.fails {
				t.Fatalf("install: %v", err)
			}
			after, err := os.ReadFile(policy)
			if string(after) != tc.before || errors.Is(err, os.ErrNotExist) != (tc.before == "") {
				t.Errorf("policy afterwards: %q, %v", after, err)
			}
			want := "101 noninteractive apt-get update -q\n"
			if !tc.fails {
				want += "101 noninteractive apt-get install -q -y --no-install-recommends redis-server\n"
			}
			if got, _ := os.ReadFile(trace); string(got) != want {
				t.Errorf("it ran\n%swant\n%s", got, want)
			}
		})
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}
