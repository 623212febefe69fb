package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// detachedImage is what Detached runs where only Docker is at hand.
const detachedImage = "postgres:17-alpine"

// supervise runs a server until the other end of its input is closed, which the system does when the
// process there ends, however it ends. Then it stops the server and removes its folder.
const supervise = `"$@" & server=$!
cat >/dev/null
kill -INT $server 2>/dev/null
wait $server
rm -rf "$HOLDFAST_SERVER_DIR"`

// Detached starts a Postgres that lasts as long as this process, and returns its address: an installed
// binary, else a container where Docker answers, else ErrNotInstalled. Nothing needs to be closed, and
// no goroutine stays behind.
func Detached(ctx context.Context) (url string, err error) {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	dir, err := os.MkdirTemp("", "holdfast-")
	if err != nil {
		return "", fmt.Errorf("testenv: %w", err)
	}
	cmd, url, err := installed(ctx, dir)
	if errors.Is(err, ErrNotInstalled) {
		cmd, url, err = contained(ctx, err)
	}
	if err == nil {
		err = startSupervised(ctx, cmd, dir, url)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("testenv: postgres: %w", err), os.RemoveAll(dir))
	}
	return url, nil
}

// installed returns the command of an instance of the installed binary.
func installed(ctx context.Context, dir string) (*exec.Cmd, string, error) {
	e, err := newPostgres(Spec{})
	if err != nil {
		return nil, "", err
	}
	if err := e.prepare(ctx, dir); err != nil {
		return nil, "", err
	}
	return e.command(), e.url(), nil
}

// contained returns the command of a container, or the error missing where Docker does not answer.
func contained(ctx context.Context, missing error) (*exec.Cmd, string, error) {
	docker, err := exec.LookPath("docker")
	if err != nil {
		return nil, "", missing
	}
	asked, cancel := context.WithTimeout(ctx, 5*time.Second) // timing: a Docker that does not answer counts as missing
	defer cancel()
	if exec.CommandContext(asked, docker, "info").Run() != nil {
		return nil, "", missing
	}
	port, err := FreePort()
	if err != nil {
		return nil, "", err
	}
	cmd := exec.Command(docker, "run", "--rm", "--publish", "127.0.0.1:"+strconv.Itoa(port)+":5432",
		"--env", "POSTGRES_HOST_AUTH_METHOD=trust", detachedImage,
		"-c", "max_connections=300", "-c", "max_pred_locks_per_transaction=256")
	return cmd, fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port), nil
}

// inputs are kept open as long as the process lives.
var inputs struct {
	sync.Mutex
	open []*os.File
}

// startSupervised returns when the server answers.
func startSupervised(ctx context.Context, server *exec.Cmd, dir, url string) error {
	log, err := os.OpenFile(filepath.Join(dir, "server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	stdin, input, err := os.Pipe()
	if err != nil {
		return err
	}
	defer stdin.Close()
	cmd := exec.Command("sh", append([]string{"-c", supervise, "sh"}, server.Args...)...)
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = dir, stdin, log, log
	cmd.Env = append(os.Environ(), "HOLDFAST_SERVER_DIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal is for the tests
	if server.SysProcAttr != nil {
		cmd.SysProcAttr.Credential = server.SysProcAttr.Credential
	}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, input.Close())
	}
	if err := awaitAnswer(ctx, url); err != nil {
		text, _ := os.ReadFile(log.Name())
		return errors.Join(fmt.Errorf("does not answer: %w; its log:\n%s", err, text), input.Close(), cmd.Wait())
	}
	inputs.Lock()
	defer inputs.Unlock()
	inputs.open = append(inputs.open, input)
	return cmd.Process.Release()
}

func awaitAnswer(ctx context.Context, url string) error {
	for {
		attempt, done := context.WithTimeout(ctx, 2*time.Second) // timing: it tries again
		err := pingPostgres(attempt, url)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}
