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

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A server ends with the process that started it. Only Linux ends a child with its parent.
func TestPrivate_endsWithTheProcess(t *testing.T) {
	t.Parallel()
	testenv.Private(t, testenv.Redis) // for the skip
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			cmd := childCommand(t.Context(), roleServe)
			out, err := cmd.StdoutPipe()
			must(t, err)
			must(t, cmd.Start())
			dir, pid := readServing(t, bufio.NewScanner(out))
			must(t, cmd.Process.Signal(sig))
			if err := cmd.Wait(); err == nil {
				t.Error("the interrupted run reported success")
			}
			testenv.Eventually(t, func() error {
				alive, err := testenv.Alive(pid)
				if alive {
					err = fmt.Errorf("the server (%d) still runs", pid)
				}
				return err
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

func TestServer_everyKindStartsAndEnds(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it starts every kind of server, twice")
	for _, kind := range []testenv.Kind{testenv.Postgres, testenv.Redis, testenv.RabbitMQ, testenv.PgBouncer, testenv.Prometheus} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			var extra []string
			if kind == testenv.PgBouncer {
				extra = []string{testenv.PostgresURL(t)}
			}
			s := testenv.Private(t, kind, extra...)
			must(t, s.Kill())
			if s.Crashed() {
				t.Error("a server killed by the test is reported as crashed")
			}
			must(t, s.Start(t.Context())) // returns when the server answers
			must(t, s.Pause())
			must(t, s.Resume())
			must(t, s.Restart(t.Context()))
			must(t, syscall.Kill(testenv.Pid(s), syscall.SIGKILL))
			testenv.Eventually(t, func() error {
				if !s.Crashed() {
					return errors.New("the crash is not reported")
				}
				return nil
			})
			must(t, s.Start(t.Context()))
			pid := testenv.Pid(s)
			must(t, s.Pause()) // Close also ends a paused server
			must(t, errors.Join(s.Close(), s.Close()))
			if alive, err := testenv.Alive(pid); alive || err != nil {
				t.Errorf("process %d is left after Close, %v", pid, err)
			}
			if _, err := os.Stat(testenv.Dir(s)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the folder is left: %v", err)
			}
			if err := s.Start(t.Context()); err == nil {
				t.Error("a closed server started")
			}
		})
	}
}

const detachedVar = "HOLDFAST_TEST_DETACHED"

// The server answers while the process that started it lives. When that process is killed, nothing is left.
func TestDetached_endsWithTheProcess(t *testing.T) {
	t.Parallel()
	if os.Getenv(detachedVar) != "" {
		url, err := testenv.Detached(context.WithoutCancel(t.Context()))
		must(t, err)
		_, _ = os.Stdout.WriteString(url + "\n")
		_, _ = os.Stdin.Read(make([]byte, 1))
		return
	}
	testenv.Nightly(t, "it starts a Postgres")
	dir, err := os.MkdirTemp("", "detached-") // t.TempDir is closed to the user postgres
	must(t, err)
	defer os.RemoveAll(dir)
	must(t, os.Chmod(dir, 0o777))
	cmd := exec.Command(os.Args[0], "-test.run=^TestDetached_endsWithTheProcess$")
	cmd.Env = append(os.Environ(), detachedVar+"=1", "TMPDIR="+dir)
	input, err := cmd.StdinPipe()
	must(t, err)
	defer input.Close()
	output, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	url, err := bufio.NewReader(output).ReadString('\n')
	must(t, err)
	url = strings.TrimSpace(url)
	must(t, testenv.Ping(t.Context(), testenv.Postgres, url, ""))
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	testenv.Eventually(t, func() error {
		if testenv.Ping(t.Context(), testenv.Postgres, url, "") == nil {
			return errors.New("the server still answers")
		}
		left, err := os.ReadDir(dir)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%v is still there", left)
		}
		return err
	})
}
