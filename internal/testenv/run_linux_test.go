package testenv_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Linux alone ends a child with its parent.
func TestServersEndWithTheProcess(t *testing.T) {
	t.Parallel()
	testenv.Private(t, testenv.Postgres) // for the skip
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			cmd := childCommand(t.Context(), roleServe)
			out, err := cmd.StdoutPipe()
			must(t, err)
			must(t, cmd.Start())
			dir, pid := readServing(t, bufio.NewScanner(out))
			must(t, cmd.Process.Signal(sig))
			if err := cmd.Wait(); err == nil {
				t.Error("the interrupted run reports success")
			}
			testenv.Eventually(t, func() error {
				alive, err := testenv.Alive(pid)
				if alive {
					err = fmt.Errorf("postgres (%d) still runs", pid)
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

// The port of a server that is down is not given to another process.
func TestPortsAreReserved(t *testing.T) {
	t.Parallel()
	port, err := testenv.FreePort()
	must(t, err)
	cmd := childCommand(t.Context(), rolePort)
	cmd.Env = append(cmd.Env, fmt.Sprintf("%s=%d", portVar, port))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
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
