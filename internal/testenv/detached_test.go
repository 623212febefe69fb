package testenv_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const detachedVar = "HOLDFAST_TEST_DETACHED"

// TestDetached: the server answers as long as the process that started it lives, also where that is
// killed, and leaves nothing behind.
func TestDetached(t *testing.T) {
	t.Parallel()
	if os.Getenv(detachedVar) != "" {
		printDetached(t)
	}
	testenv.AllowPrivate(t)
	dir, err := os.MkdirTemp("", "detached-") // t.TempDir is closed to the user postgres
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestDetached$")
	cmd.Env = append(os.Environ(), detachedVar+"=1", "TMPDIR="+dir)
	input, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer input.Close()
	output, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 1000)
	n, err := output.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	url := strings.TrimSpace(string(line[:n]))
	if url == "missing" {
		_ = cmd.Wait()
		testenv.Missing(t, "no Postgres is installed and no Docker answers")
	}
	if err := testenv.Ping(t.Context(), testenv.Postgres, url, ""); err != nil {
		t.Fatalf("%q: %v", line[:n], err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	testenv.Eventually(t, func() error {
		if testenv.Ping(t.Context(), testenv.Postgres, url, "") == nil {
			return errors.New("the server still answers")
		}
		left, err := os.ReadDir(dir)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%v is still there", left)
		}
		return err
	})
}

// printDetached prints the address and waits to be killed.
func printDetached(t *testing.T) {
	t.Helper()
	url, err := testenv.Detached(context.WithoutCancel(t.Context()))
	if errors.Is(err, testenv.ErrNotInstalled) {
		_, _ = os.Stdout.WriteString("missing\n")
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	_, _ = os.Stdout.WriteString(url + "\n")
	_, _ = os.Stdin.Read(make([]byte, 1))
}
