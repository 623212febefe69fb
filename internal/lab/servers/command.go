package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// patience is how long the command may take to end after a signal.
const patience = 15 * time.Second

// runCommand runs the command until it ends or ctx is cancelled, and returns its exit code.
func runCommand(ctx context.Context, args, env []string) (int, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), env...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = patience
	err := cmd.Run()
	if ended := new(exec.ExitError); errors.As(err, &ended) {
		if status, ok := ended.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			return 128 + int(status.Signal()), nil
		}
		return ended.ExitCode(), nil
	}
	if err != nil {
		return exitUnusable, err
	}
	return 0, nil
}

// watchParent cancels when the go command that runs this program is gone: it
// does not pass a SIGTERM on, and nothing reaches us when it is killed.
func watchParent(ctx context.Context, cancel context.CancelCauseFunc) {
	parent := os.Getppid()
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", parent))
	if err != nil || strings.TrimSpace(string(name)) != "go" {
		return
	}
	for ctx.Err() == nil {
		if os.Getppid() != parent {
			cancel(errors.New("the go command is gone"))
			return
		}
		time.Sleep(200 * time.Millisecond)
	}
}
