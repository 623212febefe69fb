// Command servers runs a command with Postgres, Redis and RabbitMQ:
//
//	go run ./internal/lab/servers -- go test ./...
//
// For each server it uses the first of these that works:
//   - the address in the environment (HOLDFAST_TEST_POSTGRES_URL, HOLDFAST_TEST_REDIS_URL,
//     HOLDFAST_TEST_AMQP_URL with HOLDFAST_TEST_AMQP_ADMIN_URL),
//   - a private instance of the installed binaries, in a temporary folder on free ports,
//   - a container, if Docker answers,
//   - as root on Debian or Ubuntu, packages installed by apt-get, without starting their daemons.
//
// It also installs PgBouncer and curl by apt-get, for the tests that start them, and with HOLDFAST_NIGHTLY=1 Prometheus and
// Chromium. It sets those variables for the command, and also HOLDFAST_TEST_CHROMIUM and HOLDFAST_TEST_PRIVATE=1, which allows
// tests to start private servers. It exits with the command's code. The servers end with it, also on SIGINT and SIGTERM.
// Without servers it prints one line about what to install, and exits with 2.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/apt"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const exitUnusable = 2

func main() {
	runtime.LockOSThread() // the command dies with the thread that starts it; the main thread never ends
	os.Exit(run())
}

func run() int {
	args := os.Args[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "usage: go run ./internal/lab/servers -- COMMAND [ARGUMENT…]")
		return exitUnusable
	}
	ctx, stop := untilSignal(context.Background())
	defer stop()

	env, closeAll, err := startServers(ctx)
	defer func() {
		if err := closeAll(); err != nil {
			fmt.Fprintln(os.Stderr, "servers:", err)
		}
	}()
	if ended := new(signalError); errors.As(context.Cause(ctx), &ended) {
		return ended.exitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "servers:", err)
		return exitUnusable
	}
	code, err := runCommand(ctx, args, env)
	if err != nil {
		fmt.Fprintln(os.Stderr, "servers:", err)
	}
	return code
}

// patience is how long the command may take to end after a signal.
const patience = 15 * time.Second

// runCommand runs the command until it ends, and returns its exit code. When a signal cancels ctx, the command and all its
// descendants get that signal: a go command alone would not stop the tests that it runs.
func runCommand(ctx context.Context, args, env []string) (int, error) {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	testenv.DieWithParent(cmd.SysProcAttr)
	if err := cmd.Start(); err != nil {
		return exitUnusable, err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return exitCode(err)
	case <-ctx.Done():
	}
	sig := syscall.SIGTERM
	if cause := new(signalError); errors.As(context.Cause(ctx), &cause) {
		sig = cause.signal
	}
	if err := testenv.EndTree(cmd.Process.Pid, sig, patience); err != nil {
		return exitUnusable, err
	}
	return exitCode(<-done)
}

// exitCode returns the exit code that a shell would: the command's own, or 128 plus the signal that ended it.
func exitCode(err error) (int, error) {
	ended := new(exec.ExitError)
	if !errors.As(err, &ended) {
		if err != nil {
			return exitUnusable, err
		}
		return 0, nil
	}
	if status, ok := ended.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal()), nil
	}
	return ended.ExitCode(), nil
}

// signalError is the cause of a context that a signal cancelled.
type signalError struct{ signal syscall.Signal }

func (e *signalError) Error() string { return e.signal.String() }

func (e *signalError) exitCode() int { return 128 + int(e.signal) }

// untilSignal returns a context that ends at SIGINT, at SIGTERM, or when the go command that runs this program is gone. The
// go command does not forward a SIGTERM, and when it is killed this program gets no signal.
func untilSignal(parent context.Context) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		goPid := goCommand()
		alive := time.NewTicker(200 * time.Millisecond)
		defer alive.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case sig := <-signals:
				cancel(&signalError{sig.(syscall.Signal)})
			case <-alive.C:
				if goPid != 0 && os.Getppid() != goPid {
					cancel(&signalError{syscall.SIGTERM})
				}
			}
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
	}
}

// goCommand returns the id of the parent process if it is the go command, else 0.
func goCommand() int {
	parent := os.Getppid()
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", parent))
	if err != nil || strings.TrimSpace(string(name)) != "go" {
		return 0
	}
	return parent
}

// fromPackages installs missing servers if that works without asking: as root on Debian or Ubuntu.
func fromPackages(ctx context.Context, needs []need, started *closers) ([]string, []need, error) {
	if !apt.CanInstall() {
		return nil, needs, nil
	}
	var packages []string
	for _, n := range needs {
		packages = append(packages, n.aptPackage)
	}
	fmt.Fprintf(os.Stderr, "servers: apt-get installs %s\n", strings.Join(packages, ", "))
	if err := apt.Install(ctx, packages...); err != nil {
		return nil, needs, err
	}
	return fromBinaries(ctx, needs, started)
}

// tools are the programs that tests start themselves, with their Debian packages.
var tools = []struct {
	aptPackage string
	nightly    bool // only nightly tests start it
	installed  func() bool
}{
	{"pgbouncer", false, testenv.PgBouncerInstalled},
	{"prometheus", true, testenv.PrometheusInstalled},
	{"chromium", true, func() bool { return browser() != "" }},
	{"curl", false, func() bool { _, err := exec.LookPath("curl"); return err == nil }},
}

// getTools installs missing tools. It only logs failures: tests without their tool are skipped, or fail if
// HOLDFAST_REQUIRE_SERVERS=1.
func getTools(ctx context.Context) {
	if !apt.CanInstall() {
		return
	}
	var missing []string
	for _, tool := range tools {
		if !tool.installed() && (!tool.nightly || os.Getenv(testenv.NightlyVar) == "1") {
			missing = append(missing, tool.aptPackage)
		}
	}
	if len(missing) == 0 {
		return
	}
	fmt.Fprintln(os.Stderr, "servers: apt-get installs", strings.Join(missing, ", "))
	if err := apt.Install(ctx, missing...); err != nil {
		fmt.Fprintf(os.Stderr, "servers: no %s: %v\n", strings.Join(missing, ", "), err)
	}
}

// browsers are the names under which a Chromium is installed.
var browsers = []string{"chromium", "google-chrome"}

// browser returns the path of an installed Chromium, or "".
func browser() string {
	for _, name := range browsers {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// browserEnv returns the variable with the path of Chromium, unless it is already set or there is none.
func browserEnv() []string {
	path := browser()
	if path == "" || os.Getenv(testenv.ChromiumVar) != "" {
		return nil
	}
	return []string{testenv.ChromiumVar + "=" + path}
}
