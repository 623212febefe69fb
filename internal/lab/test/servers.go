package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// servers is internal/lab/servers in a process of its own. It starts while the tests are compiled.
type servers struct {
	dir  string // its files, and the measurements of the tests
	tier int
	cmd  *exec.Cmd
	hold io.Closer     // the servers end when it closes
	cpu  time.Duration // of the servers, once stopped
}

// The files that tell the tests how the start went.
const (
	environmentFile = "environment"
	failedFile      = "failed"
)

// environment is the file that names the servers, a variable in a line. It appears when they answer.
func (s *servers) environment() string { return filepath.Join(s.dir, environmentFile) }

// await waits until the servers answer and returns the variables that name them. How long that takes depends on how much
// is to be installed.
func (s *servers) await(ctx context.Context) ([]string, error) {
	if s.cmd == nil {
		return nil, nil
	}
	for ctx.Err() == nil {
		if text, err := os.ReadFile(s.environment()); err == nil {
			return strings.Fields(string(text)), nil
		}
		if _, err := os.Stat(filepath.Join(s.dir, failedFile)); err == nil {
			return nil, fmt.Errorf("%w: servers (see above)", errUnusable)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil, ctx.Err()
}

// start builds the command and starts it. It does not wait for the servers.
func (s *servers) start(ctx context.Context) error {
	program := filepath.Join("bin", "servers")
	if _, err := goCommand(ctx, "build", "-buildvcs=false", "-o", program, "./internal/lab/servers"); err != nil {
		return err
	}
	const publish = `env | grep ^HOLDFAST_ > "$0.part"; mv "$0.part" "$0"; cat > /dev/null`
	s.cmd = exec.Command(program, "--", "sh", "-c", publish, s.environment())
	s.cmd.Env = append(os.Environ(), inMemory("/dev/shm")...)
	if s.tier == 3 {
		s.cmd.Env = append(s.cmd.Env, "HOLDFAST_NIGHTLY=1")
	}
	s.cmd.Stderr = os.Stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt of the terminal must not end them before the tests
	hold, err := s.cmd.StdinPipe()
	if err != nil {
		return err
	}
	s.hold = hold
	if err := s.cmd.Start(); err != nil {
		return err
	}
	go func() {
		err := s.cmd.Wait()
		_ = os.WriteFile(filepath.Join(s.dir, failedFile), fmt.Append(nil, err), 0o644)
	}()
	return nil
}

// stop ends the servers and adds up their CPU time.
func (s *servers) stop() error {
	if s.cmd == nil {
		return nil
	}
	_ = s.hold.Close()
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(filepath.Join(s.dir, failedFile)); err == nil {
			break
		}
		if time.Now().After(end) {
			return errors.Join(errors.New("the servers did not end"), s.cmd.Process.Kill())
		}
	}
	state := s.cmd.ProcessState
	s.cpu = state.UserTime() + state.SystemTime()
	if code := state.ExitCode(); code == exitUnusable {
		return fmt.Errorf("%w: servers (see above)", errUnusable)
	} else if code != 0 {
		return fmt.Errorf("servers: %s", state)
	}
	return nil
}
