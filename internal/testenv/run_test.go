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

// The tests below run this test binary again, in one of these roles.
const (
	roleVar   = "HOLDFAST_TESTENV_ROLE"
	roleLeak  = "leak"
	roleClean = "clean"
	roleServe = "serve"
	rolePort  = "port"

	portVar = "HOLDFAST_TESTENV_PORT"
)

// TestRole is what the child process runs; in the parent it does nothing.
func TestRole(t *testing.T) {
	switch os.Getenv(roleVar) {
	case roleLeak:
		*testenv.LeakPatience = time.Second
		go func() { select {} }()
	case roleServe:
		s := testenv.Private(t, testenv.Postgres)
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

func childCommand(ctx context.Context, role string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestRole$", "-test.v")
	cmd.Env = append(os.Environ(), roleVar+"="+role)
	return cmd
}
