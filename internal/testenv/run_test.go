package testenv_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The tests below run this test binary again, in one of these roles.
const (
	roleVar   = "HOLDFAST_TESTENV_ROLE"
	roleLeak  = "leak"
	roleClean = "clean"
	roleServe = "serve"
)

// TestRole is what the child process runs; in the parent it does nothing.
func TestRole(t *testing.T) {
	switch os.Getenv(roleVar) {
	case roleLeak:
		go func() { select {} }()
	case roleServe:
		s := testenv.Private(t, testenv.Postgres)
		fmt.Printf("\nserving %s %d\n", testenv.Dir(s), testenv.Pid(s))
		select {}
	}
}

func TestRunFindsLeaks(t *testing.T) {
	t.Parallel()
	out, err := childCommand(t.Context(), roleLeak).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "TestRole") {
		t.Errorf("a leaked goroutine goes unnoticed: %v\n%s", err, out)
	}
	if out, err := childCommand(t.Context(), roleClean).CombinedOutput(); err != nil {
		t.Errorf("clean run: %v\n%s", err, out)
	}
}

func TestServersEndWithTheProcess(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("only Linux ends a child with its parent")
	}
	testenv.Private(t, testenv.Postgres) // for the skip
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			cmd := childCommand(t.Context(), roleServe)
			out, err := cmd.StdoutPipe()
			must(t, err)
			must(t, cmd.Start())
			dir, pid := readServing(t, bufio.NewScanner(out))
			must(t, cmd.Process.Signal(sig))
			if err := cmd.Wait(); err == nil {
				t.Error("the interrupted run reports success")
			}
			testenv.Eventually(t, 15*time.Second, func() error {
				if syscall.Kill(pid, 0) == nil {
					return fmt.Errorf("postgres (%d) still runs", pid)
				}
				return nil
			})
			if _, err := os.Stat(dir); sig != syscall.SIGKILL && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("folder %s is left: %v", dir, err)
			}
			must(t, os.RemoveAll(dir))
		})
	}
}

func readServing(t *testing.T, lines *bufio.Scanner) (dir string, pid int) {
	t.Helper()
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) == 3 && fields[0] == "serving" {
			pid, err := strconv.Atoi(fields[2])
			must(t, err)
			return fields[1], pid
		}
	}
	t.Fatalf("the child ended early: %v", lines.Err())
	return "", 0
}

func childCommand(ctx context.Context, role string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestRole$", "-test.v")
	cmd.Env = append(os.Environ(), roleVar+"="+role)
	return cmd
}
