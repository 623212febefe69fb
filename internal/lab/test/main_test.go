package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv("HOLDFAST_TEST_MAIN") == "1" {
		main()
	}
	os.Exit(testenv.Run(m))
}

// fakeGo stands in for the go command: it records its calls, and what it builds echoes its arguments.
const fakeGo = `#!/bin/sh
echo "$GOWORK $*" >> "$REPOSITORY/calls"
case "$*" in
"env GOWORK") echo "$REPOSITORY/go.work" ;;
"build -buildvcs=false -o "*) mkdir -p bin; printf '#!/bin/sh\necho "$@"; exit 7\n' > "$4"; chmod +x "$4" ;;
esac
`

// program runs this command in dir as its repository, with fakeGo and what else it shall do.
func program(t *testing.T, dir, more string, env ...string) (output string, code int) {
	t.Helper()
	tools := t.TempDir()
	write(t, filepath.Join(tools, "go"), fakeGo+more)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "HOLDFAST_TEST_MAIN=1", "REPOSITORY="+dir, "GOWORK=",
		"PATH="+tools+string(filepath.ListSeparator)+os.Getenv("PATH"))
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput()
	if ended := new(exec.ExitError); err != nil && !errors.As(err, &ended) {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

func TestChecksThenTests(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	output, code := program(t, dir, "")
	if code != 7 {
		t.Errorf("exit code %d, want that of the tests", code)
	}
	if want := fmt.Sprintf("go test -vet=off -shuffle=on -timeout=75m -p=%d -race ./internal/lab/faults ./inbox/inboxamqp ./examples/reservation ./outbox/outboxpgx work\n", max(3, runtime.NumCPU())); !strings.HasSuffix(output, want) {
		t.Errorf("the output does not end in %q:\n%s", want, output)
	}
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{" vet -race -tags=interop work\n", "off vet -race ./...\n", "off build -race ./...\n", " list -m all\n"} {
		if !strings.Contains(string(calls), want) {
			t.Errorf("no %q among the calls:\n%s", want, calls)
		}
	}
}

func TestNoRaceDetector(t *testing.T) {
	t.Parallel()
	output, code := program(t, t.TempDir(), `[ "$2" != -race ] || { echo "no C compiler"; exit 1; }`)
	if code != 7 || !strings.Contains(output, "without the race detector") || !strings.Contains(output, ": no C compiler\n") {
		t.Errorf("exit code %d, output:\n%s", code, output)
	}
	if strings.Contains(output, " -race") {
		t.Errorf("the tests are run with -race:\n%s", output)
	}
}

func TestFailures(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, does, file, want string
	}{
		{name: "vet", does: `[ "$1" != vet ] || exit 3`, want: "test: go vet -race -tags=interop work: exit status 3\n"},
		{name: "format", file: "package  main\n", want: "not formatted by gofmt: main.go\n"},
		{name: "syntax", file: "package\n", want: "main.go:"},
		{name: "changed file", does: `[ "$1" != vet ] || echo more >> "$REPOSITORY/go.work.sum"`, want: "changed what is to be committed: go.work.sum\n"},
		{name: "no workspace", does: `[ "$1" != env ] || exit 1`, want: "test: go env: exit status 1\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			write(t, filepath.Join(dir, "go.work.sum"), "")
			if tc.file != "" {
				write(t, filepath.Join(dir, "main.go"), tc.file)
			}
			output, code := program(t, dir, tc.does)
			if code != 1 || !strings.Contains(output, tc.want) {
				t.Errorf("exit code %d, want 1 and %q; output:\n%s", code, tc.want, output)
			}
			if strings.Contains(output, " test ") {
				t.Errorf("the tests are run:\n%s", output)
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
