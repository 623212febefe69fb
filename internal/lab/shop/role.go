package shop

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"
)

// EndsWithin is the time that a shop has for its end after a signal: it promises 44 s.
const EndsWithin = 45 * time.Second

// Role is a process of a shop that runs.
type Role struct {
	Name string
	// URL is where it listens, "" where it does not.
	URL string
	cmd *exec.Cmd
}

// Roles are the processes of one shop.
type Roles []*Role

// Stop ends all, in their order.
func (all Roles) Stop() error {
	var errs []error
	for _, r := range all {
		errs = append(errs, r.stop())
	}
	return errors.Join(errs...)
}

// Start returns when the process runs. Its log goes to that of this process. The limits on the rate are
// counted and never reached. Later flags replace earlier ones.
func (d *Data) Start(ctx context.Context, role string, flags ...string) (*Role, error) {
	path, err := Binary()
	if err != nil {
		return nil, err
	}
	args := []string{"-backend=services", "-role=" + role, "-user-limit=1000000000", "-global-limit=1000000000"}
	if role == "api" {
		args = append(args, "-addr=127.0.0.1:0")
	}
	cmd := exec.CommandContext(ctx, path, slices.Concat(args, flags)...)
	named := d.Servers
	named.Database += "&application_name=" + role // pg_stat_activity shows whose a connection is
	cmd.Env = append(os.Environ(), named.Env()...)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() {
		return nil, fmt.Errorf("the shop does not start: %s %v: %w", role, flags, cmd.Wait())
	}
	_, after, _ := strings.Cut(lines.Text(), "listening on ")
	address, _, _ := strings.Cut(after, " ")
	go func() { _, _ = io.Copy(io.Discard, stdout) }()
	return &Role{role, address, cmd}, nil
}

// PID is the id of the process.
func (r *Role) PID() int { return r.cmd.Process.Pid }

func (r *Role) stop() error {
	_ = r.cmd.Process.Signal(syscall.SIGTERM) // it may have ended, as Wait tells
	late := time.AfterFunc(EndsWithin, func() { _ = r.cmd.Process.Kill() })
	defer late.Stop()
	return r.cmd.Wait()
}
