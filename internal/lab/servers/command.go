package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// patience is how long the command may take to end after a signal.
const patience = 15 * time.Second

// runCommand runs the command until it ends, and returns its exit code. When ctx is cancelled
// by a signal, the command and its descendants get that signal: a go command that is
// told to end would leave the tests it runs behind.
func runCommand(ctx context.Context, args, env []string) (int, error) {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	testenv.DieWithParent(cmd.SysProcAttr)
	if err := cmd.Start(); err != nil {
		return exitUnusable, err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return exitCode(err)
	case <-ctx.Done():
	}
	sig := syscall.SIGTERM
	if cause := new(signalError); errors.As(context.Cause(ctx), &cause) {
		sig = cause.signal
	}
	if err := testenv.EndTree(cmd.Process.Pid, sig, patience); err != nil {
		return exitUnusable, err
	}
	return exitCode(<-done)
}

// exitCode returns what a shell would: the command's own code, or 128 and the signal that ended it.
func exitCode(err error) (int, error) {
	ended := new(exec.ExitError)
	if !errors.As(err, &ended) {
		if err != nil {
			return exitUnusable, err
		}
		return 0, nil
	}
	if status, ok := ended.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal()), nil
	}
	return ended.ExitCode(), nil
}
