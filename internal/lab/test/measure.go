package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// go test runs this program around each test binary, as `-exec` says.
const (
	wrapperVar = "HOLDFAST_TEST_WRAPPER" // the folder of the measurements
	wrapperArg = "run-test-binary"
)

// usage is the CPU time that one test binary has used, with the servers that it started itself.
type usage struct {
	Dir   string                   // of the package
	CPU   time.Duration            // of all processes
	Tests map[string]time.Duration // of the top-level tests; see attribute
}

// measured runs a test binary, writes down its CPU time, and returns its exit code.
func measured(dir string, args []string) int {
	runtime.LockOSThread() // the test binary ends with the thread that started it
	out, in, err := os.Pipe()
	if err != nil {
		fmt.Fprintln(os.Stderr, "test:", err)
		return exitUnusable
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = in, in // one pipe keeps a panic after the lines before it
	cmd.SysProcAttr = dieWithParent()
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "test:", err)
		return exitUnusable
	}
	_ = in.Close()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGQUIT) // SIGQUIT: go test's timeout
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s)
		}
	}()
	tests := make(chan map[string]time.Duration, 1)
	go func() { tests <- attribute(out, os.Stdout, func() time.Duration { return cpuTime(cmd.Process.Pid) }) }()
	_ = cmd.Wait()
	_ = out.SetReadDeadline(time.Now().Add(10 * time.Second)) // a process that was left behind may keep the pipe open
	u := usage{Tests: <-tests}
	u.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	u.Dir, _ = os.Getwd()
	if text, err := json.Marshal(u); err == nil {
		_ = os.WriteFile(usageFile(dir, u.Dir), text, 0o644) // the runner fails if it is missing
	}
	code := cmd.ProcessState.ExitCode()
	if code != 0 && code != 1 { // 1 is that of a failed test
		fmt.Printf("test binary ended: %s\n", cmd.ProcessState)
	}
	if code < 0 { // a signal
		return 1
	}
	return code
}

// usageFile is the file in dir with the usage of the package in the folder of.
func usageFile(dir, of string) string {
	return filepath.Join(dir, strings.NewReplacer("/", "-", " ", "-").Replace(of)+".usage")
}

func readUsage(dir, of string) (usage, error) {
	var u usage
	text, err := os.ReadFile(usageFile(dir, of))
	if err == nil {
		err = json.Unmarshal(text, &u)
	}
	return u, err
}

// marker is a line in which a top-level test starts, stops or resumes running.
var marker = regexp.MustCompile(`^\x16?(=== RUN |=== PAUSE|=== CONT |--- PASS:|--- FAIL:|--- SKIP:) +([^/\s]+)(\s|$)`)

// attribute copies the output of a test binary and returns the CPU time of its top-level tests. The CPU time between two
// markers is divided equally among the tests that ran meanwhile, so the figure of one test is an estimate and the sum is
// exact.
func attribute(from io.Reader, to io.Writer, cpu func() time.Duration) map[string]time.Duration {
	used, running := map[string]time.Duration{}, map[string]bool{}
	var last time.Duration
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadBytes('\n')
		if m := marker.FindSubmatch(line); m != nil {
			now := cpu()
			for name := range running {
				used[name] += max(0, now-last) / time.Duration(len(running))
			}
			last = max(last, now)
			if name := string(m[2]); bytes.HasPrefix(m[1], []byte("=== RUN")) || bytes.HasPrefix(m[1], []byte("=== CONT")) {
				running[name] = true
			} else {
				delete(running, name)
			}
		}
		_, _ = to.Write(line)
		if err != nil {
			return used
		}
	}
}
