package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv("HOLDFAST_SERVERS_MAIN") == "1" {
		main()
	}
	os.Exit(testenv.Run(m))
}

// program is this command as a process that starts only Redis; the other addresses are given.
func program(t *testing.T, args ...string) (cmd *exec.Cmd, temp string) {
	t.Helper()
	testenv.Private(t, testenv.Redis) // skips if Redis is not installed
	temp = t.TempDir()
	cmd = exec.CommandContext(t.Context(), os.Args[0], append([]string{"--"}, args...)...)
	cmd.Env = append(os.Environ(), "HOLDFAST_SERVERS_MAIN=1",
		testenv.PostgresVar+"=postgres://given", testenv.AMQPVar+"=amqp://given", testenv.AMQPAdminVar+"=http://given", testenv.NATSVar+"=nats://given",
		testenv.RedisVar+"=", "TMPDIR="+temp)
	return cmd, temp
}

func TestCommand_getsServersAndKeepsExitCode(t *testing.T) {
	t.Parallel()
	cmd, temp := program(t, "sh", "-c", "env; cat; exit 7")
	cmd.Stdin = strings.NewReader("from stdin")
	out, err := cmd.Output()
	ended := new(exec.ExitError)
	if !errors.As(err, &ended) || ended.ExitCode() != 7 {
		t.Errorf("ended with %v, want code 7", err)
	}
	for _, want := range []string{
		testenv.PostgresVar + "=postgres://given\n", testenv.RedisVar + "=redis://127.0.0.1:",
		testenv.PrivateVar + "=1\n", "from stdin",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the command did not see %q", want)
		}
	}
	wantEmpty(t, temp)
}

func TestNothingIsLeftAfterASignal(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			cmd, temp := program(t, "sh", "-c", "echo $HOLDFAST_TEST_REDIS_URL; echo $$; sh -c 'echo $$; exec sleep 1000'; exit")
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(out)
			redis := strings.TrimSuffix(strings.TrimPrefix(readLine(t, lines), "redis://"), "/0")
			shell, sleep := readPid(t, lines), readPid(t, lines)
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			wantRefused(t, redis)
			wantGone(t, shell)
			if sig == syscall.SIGKILL {
				_ = syscall.Kill(sleep, syscall.SIGKILL) // a grandchild does not die with this process
				return
			}
			if code := cmd.ProcessState.ExitCode(); code != 128+int(sig) {
				t.Errorf("exit code %d, want %d", code, 128+int(sig))
			}
			wantGone(t, sleep)
			wantEmpty(t, temp)
		})
	}
}

// A fake docker and a real Redis replace Docker: the container is started with its arguments, polled until it
// answers, and removed.
func TestContainer_startsAndIsRemoved(t *testing.T) {
	server := testenv.Private(t, testenv.Redis)
	dir := t.TempDir()
	calls := filepath.Join(dir, "calls")
	write(t, filepath.Join(dir, "docker"), "#!/bin/sh\necho \"$@\" >> "+calls+"\n")
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	c := redisContainer
	c.urls = []string{server.URL() + "#%s"}
	var started closers
	if _, err := c.start(t.Context(), testenv.Redis, &started); err != nil {
		t.Fatal(err)
	}
	if err := started.close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(calls)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	name := strings.Fields(lines[0])[4]
	if len(lines) != 2 || !strings.HasPrefix(lines[0], "run --rm --detach --name holdfast-") || !strings.Contains(lines[0], " redis:8.0-alpine redis-server ") ||
		lines[1] != "rm --force --volumes "+name {
		t.Errorf("docker was called with\n%s", text)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

func readLine(t *testing.T, lines *bufio.Scanner) string {
	t.Helper()
	if !lines.Scan() {
		t.Fatalf("the command ended early: %v", lines.Err())
	}
	return lines.Text()
}

func readPid(t *testing.T, lines *bufio.Scanner) int {
	t.Helper()
	pid, err := strconv.Atoi(readLine(t, lines))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func wantGone(t *testing.T, pid int) {
	t.Helper()
	testenv.Eventually(t, func() error {
		state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err == nil && !strings.Contains(string(state), ") Z ") {
			return fmt.Errorf("process %d is left", pid)
		}
		return nil
	})
}

func wantRefused(t *testing.T, addr string) {
	t.Helper()
	testenv.Eventually(t, func() error {
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			return errors.Join(fmt.Errorf("%s still accepts", addr), conn.Close())
		}
		return nil
	})
}

func wantEmpty(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left in the temporary folder: %v %v", left, err)
	}
}
