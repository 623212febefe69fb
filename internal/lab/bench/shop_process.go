package main

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

// A shop promises to end within 44 s of a signal.
const shopEndsWithin = 45 * time.Second

// process is one role of a shop.
type process struct {
	cmd *exec.Cmd
	url string // "" where it does not listen
}

type processes []*process

// stop ends all, those behind the api last.
func (all processes) stop() error {
	var errs []error
	for _, p := range all {
		errs = append(errs, p.stop())
	}
	return errors.Join(errs...)
}

// start returns when the process runs. Its log goes to that of this process. The limits on the rate are
// counted and never reached; a process that nobody ends does so by itself.
func (p *shopPlace) start(ctx context.Context, data *shopData, args ...string) (*process, error) {
	args = slices.Concat([]string{"-user-limit=1000000000", "-global-limit=1000000000", "-time-limit=15m"}, args)
	if slices.Contains(args, "-role=api") {
		args = append(args, "-addr=127.0.0.1:0")
	}
	cmd := exec.CommandContext(ctx, p.program, args...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+data.url, "REDIS_URL="+p.redisURL, "AMQP_URL="+p.amqpURL)
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
		return nil, fmt.Errorf("the shop does not start: %v: %w", args, cmd.Wait())
	}
	_, after, _ := strings.Cut(lines.Text(), "listening on ")
	address, _, _ := strings.Cut(after, " ")
	go func() { _, _ = io.Copy(io.Discard, stdout) }()
	return &process{cmd, address}, nil
}

func (p *process) stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended, as Wait tells
	late := time.AfterFunc(shopEndsWithin, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	return p.cmd.Wait()
}
