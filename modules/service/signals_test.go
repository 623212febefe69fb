package service_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/service"
)

// stuckProgram is a service with a part that does not stop.
func stuckProgram() {
	g := &service.Group{StopTimeout: time.Hour}
	g.Add("stuck", run(func(ctx context.Context) error {
		fmt.Fprintln(os.Stdout, "running")
		<-ctx.Done()
		fmt.Fprintln(os.Stdout, "stopping")
		select {}
	}))
	fmt.Fprintln(os.Stdout, g.Run(service.Signals()))
	os.Exit(3)
}

// The first signal starts the end. The second ends the process at once, although a part is stuck.
func TestSignals_secondEndsAtOnce(t *testing.T) {
	t.Parallel()
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		self, err := os.Executable()
		link := filepath.Join(t.TempDir(), "stuck")
		if err := errors.Join(err, os.Symlink(self, link)); err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), link)
		out, err := cmd.StdoutPipe()
		if err := errors.Join(err, cmd.Start()); err != nil {
			t.Fatal(err)
		}
		watchdog := time.AfterFunc(testenv.Patience, func() { _ = cmd.Process.Kill() }) // a hang: it fails below
		lines := bufio.NewScanner(out)
		for _, want := range []string{"running", "stopping"} {
			if !lines.Scan() || lines.Text() != want {
				t.Fatalf("printed %q, want %q", lines.Text(), want)
			}
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
		}
		err = cmd.Wait()
		watchdog.Stop()
		if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != signal {
			t.Errorf("after two %v: %v", signal, err)
		}
	}
}
