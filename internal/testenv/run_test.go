package testenv_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The tests of this package run this test binary again, in one of these roles.
const (
	roleVar   = "HOLDFAST_TESTENV_ROLE"
	roleLeak  = "leak"
	roleClean = "clean"
	roleServe = "serve"
	rolePort  = "port"

	portVar = "HOLDFAST_TESTENV_PORT"
)

// TestRole is the child process. It does nothing in the parent.
func TestRole(t *testing.T) {
	switch os.Getenv(roleVar) {
	case roleLeak:
		*testenv.LeakPatience = 100 * time.Millisecond
		go func() { select {} }()
	case roleServe:
		s := testenv.Private(t, testenv.Redis)
		fmt.Printf("\nserving %s %d\n", testenv.Dir(s), testenv.Pid(s))
		select {}
	case rolePort:
		port, err := strconv.Atoi(os.Getenv(portVar))
		must(t, err)
		if testenv.Reserve(port) {
			t.Errorf("port %d is another process's", port)
		}
	}
}

func childCommand(ctx context.Context, role string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestRole$", "-test.v")
	cmd.Env = append(os.Environ(), roleVar+"="+role)
	return cmd
}

func TestRun_findsLeaks(t *testing.T) {
	t.Parallel()
	out, err := childCommand(t.Context(), roleLeak).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "TestRole") {
		t.Errorf("a leaked goroutine was not detected: %v\n%s", err, out)
	}
	if out, err := childCommand(t.Context(), roleClean).CombinedOutput(); err != nil {
		t.Errorf("clean run: %v\n%s", err, out)
	}
}

// The port of a stopped server is not given to another one, in this process or any other.
func TestFreePort_isReserved(t *testing.T) {
	t.Parallel()
	port, err := testenv.FreePort()
	must(t, err)
	if testenv.Reserve(port) {
		t.Errorf("port %d was given twice", port)
	}
	cmd := childCommand(t.Context(), rolePort)
	cmd.Env = append(cmd.Env, fmt.Sprintf("%s=%d", portVar, port))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
