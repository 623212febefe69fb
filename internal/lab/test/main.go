// Command test checks the whole repository:
//
//	go run ./internal/lab/test
//
// It looks for files that gofmt would change, vets and builds all modules, and fails when that
// changes a file of the go command, such as go.work.sum. Then it runs all tests, with the race
// detector where cgo works, under internal/lab/servers, which gets the servers they need. Their files
// are in memory where /dev/shm can take them, unless TMPDIR is set.
//
// It imports the standard library only: so it runs before any module is downloaded, and can say
// in one line what is missing.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
)

// exitUnusable is the exit code when something is missing that the command cannot get by itself.
const exitUnusable = 2

// errUnusable marks an error that is about the machine and not about the repository.
var errUnusable = errors.New("missing")

func main() {
	err := run()
	fmt.Fprintln(os.Stderr, "test:", err)
	if errors.Is(err, errUnusable) {
		os.Exit(exitUnusable)
	}
	os.Exit(1)
}

// run returns only when a check fails: at the end this process becomes the tests' own.
func run() error {
	parent := os.Getppid()
	root, err := repository()
	if err != nil {
		return err
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := checkProc("/proc"); err != nil {
		return err
	}
	if err := checkFormat("."); err != nil {
		return err
	}
	if err := download(); err != nil {
		return err
	}
	var race []string
	if raceDetector() {
		race = []string{"-race"}
	}
	if err := checkBuild(race); err != nil {
		return err
	}
	return becomeTests(parent, race)
}

// repository returns the folder of the go.work that this program was started with.
func repository() (string, error) {
	out, err := exec.Command("go", "env", "GOWORK").Output()
	if err != nil {
		return "", fmt.Errorf("go env: %w", err)
	}
	work := strings.TrimSpace(string(out))
	if work == "" || work == "off" {
		return "", errors.New("start it inside the repository, with its go.work in use")
	}
	return filepath.Dir(work), nil
}

// checkBuild vets and builds everything as the workspace, and the root module as its users get it: for the
// race detector if the tests are, since what is compiled then serves both.
func checkBuild(race []string) error {
	before, err := sums(".")
	if err != nil {
		return err
	}
	for _, step := range []struct{ env, verb, args string }{
		{verb: "vet", args: "-tags=interop work"}, // with the tests that make interop alone runs
		{env: "GOWORK=off", verb: "vet", args: "./..."},
		{env: "GOWORK=off", verb: "build", args: "./..."},
	} {
		if err := goCommand(step.env, slices.Concat([]string{step.verb}, race, strings.Fields(step.args))...); err != nil {
			return err
		}
	}
	if err := goCommand("", "list", "-m", "all"); err != nil { // as editors do
		return err
	}
	after, err := sums(".")
	if err != nil {
		return err
	}
	return unchanged(before, after)
}

// goCommand runs the go command with one more variable, or none. Only its complaints are shown.
func goCommand(env string, args ...string) error {
	line := strings.TrimSpace(env + " go " + strings.Join(args, " "))
	fmt.Fprintln(os.Stderr, "test:", line)
	cmd := exec.Command("go", args...)
	cmd.Env = os.Environ()
	if env != "" {
		cmd.Env = append(cmd.Env, env)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", line, err)
	}
	return nil
}

// becomeTests replaces this process by the tests: the servers' command watches the go command that
// started it, and takes the signals.
func becomeTests(parent int, race []string) error {
	servers := filepath.Join("bin", "servers")
	if err := goCommand("", "build", "-buildvcs=false", "-o", servers, "./internal/lab/servers"); err != nil {
		return err
	}
	goTool, err := exec.LookPath("go")
	if err != nil {
		return err
	}
	args := []string{servers, "--", goTool, "test", "-vet=off", "-shuffle=on", "-timeout=75m", fmt.Sprintf("-p=%d", max(atOnce, runtime.NumCPU()))}
	if os.Getppid() != parent { // it was ended, and could not say so
		return errors.New("the go command that ran this is gone")
	}
	env := append(os.Environ(), inMemory("/dev/shm")...)
	return syscall.Exec(servers, slices.Concat(args, race, strings.Fields(longest), []string{"work"}), env)
}

const (
	// atOnce is how many packages are tested at the same time, at least. Their tests often wait for
	// servers and clocks. On two slow processors five of them kept the servers from answering for
	// longer than deadlines, with the race detector four.
	atOnce = 3
	// longest are the packages whose tests take longest, so they begin first.
	longest = "./internal/lab/faults ./inbox/inboxamqp ./examples/reservation ./outbox/outboxpgx"
)

// raceDetector reports whether tests can be built with the race detector, which needs cgo.
func raceDetector() bool {
	out, err := exec.Command("go", "build", "-race", "runtime/cgo").CombinedOutput()
	if err == nil {
		return true
	}
	why, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	fmt.Fprintf(os.Stderr, "test: without the race detector on %s/%s: %s\n", runtime.GOOS, runtime.GOARCH, why)
	return false
}
