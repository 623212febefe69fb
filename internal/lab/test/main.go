// Command test runs the tests of the whole repository, in one of three tiers:
//
//	go run ./internal/lab/test            # tier 2: everything that a change must not break, on real servers
//	go run ./internal/lab/test -tier=1    # without servers: the same as `go test work`, with a summary
//	go run ./internal/lab/test -tier=3    # with the nightly tests; `make nightly` adds the other parts of a night
//
// It checks the formatting and compiles every package with its tests, while internal/lab/servers starts the servers. It
// runs the tests of every module in go.work, and fails if that changed a file of the go command, such as go.work.sum.
// It prints a line for each package, the output of each failed test at once, and at the end the slowest packages and
// tests. A package or test that needs more CPU time than its budget fails the run (see budget.txt): unlike wall time,
// CPU time hardly depends on other load.
//
// It imports the standard library only, so that it runs before any module is downloaded and can list missing programs.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// exitUnusable is the exit code when something is missing that the command cannot get by itself.
const exitUnusable = 2

// errUnusable marks an error of the machine, not of the repository.
var errUnusable = errors.New("missing")

// usageError is an error in the arguments.
type usageError string

func (e usageError) Error() string { return string(e) }

// options are the flags.
type options struct {
	tier     int
	race     bool
	packages []string // empty: all
}

func main() {
	if dir := os.Getenv(wrapperVar); dir != "" && len(os.Args) > 1 && os.Args[1] == wrapperArg {
		os.Exit(measured(dir, os.Args[2:]))
	}
	var o options
	part := flag.String("part", "", "run one part of the night: "+strings.Join(partNames(), ", "))
	night := flag.Bool("nightly", false, "run all parts of the night and write the report")
	flag.IntVar(&o.tier, "tier", 2, "1: without servers, 2: on real servers, 3: with the nightly tests")
	flag.BoolVar(&o.race, "race", false, "use the race detector (needs a C compiler)")
	flag.Usage = usageText
	flag.Parse()
	o.packages = flag.Args()
	ctx, stop := untilEnded()
	defer stop()
	var err error
	switch {
	case o.tier < 1 || o.tier > 3:
		err = usageError(fmt.Sprintf("unknown tier %d; tiers: 1, 2, 3", o.tier))
	case *night || *part != "":
		err = nightly(ctx, *part)
	default:
		err = run(ctx, o)
	}
	if err == nil {
		return
	}
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	fmt.Fprintln(os.Stderr, "test:", err)
	if usage := usageError(""); errors.As(err, &usage) || errors.Is(err, errUnusable) {
		os.Exit(exitUnusable)
	}
	os.Exit(1)
}

func usageText() {
	fmt.Fprint(flag.CommandLine.Output(), `usage: go run ./internal/lab/test [FLAG…] [PACKAGE…]

PACKAGE is a pattern of the go command, relative to the current folder:
  go run ./internal/lab/test ./outbox/... ./inbox
Without one, every module of the repository is tested.

`)
	flag.PrintDefaults()
}

// untilEnded returns a context that ends at SIGINT, at SIGTERM, or when the go command that runs this program is gone:
// the go command does not pass signals on.
func untilEnded() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	parent := os.Getppid()
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		for ctx.Err() == nil {
			if os.Getppid() != parent {
				cancel()
			}
			time.Sleep(200 * time.Millisecond)
		}
	}()
	return ctx, func() { cancel(); stop() }
}

// run checks the repository and runs the tests of one tier.
func run(ctx context.Context, o options) error {
	root, err := repository()
	if err != nil {
		return err
	}
	if o.packages, err = fromRoot(root, o.packages); err != nil {
		return err
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := checkProc("/proc"); err != nil {
		return err
	}
	announce(o)
	clock := newClock()
	if err := checkFormat("."); err != nil {
		return err
	}
	before, err := sums(".")
	if err != nil {
		return err
	}
	clock.done("formatting")
	if err := download(ctx); err != nil {
		return err
	}
	clock.done("download")

	dir, err := os.MkdirTemp("", "holdfast-test-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	servers := &servers{dir: dir, tier: o.tier}
	if o.tier > 1 {
		if err := servers.start(ctx); err != nil {
			return err
		}
	}
	packages, err := compile(ctx, o)
	if err != nil {
		return errors.Join(err, servers.stop())
	}
	clock.done("compile")
	if err := checkSums(ctx, before); err != nil {
		return errors.Join(err, servers.stop())
	}
	env, err := servers.await(ctx)
	if err != nil {
		return cmp.Or(servers.stop(), err)
	}
	clock.done("servers")
	results, err := runTests(ctx, o, dir, packages, env)
	clock.done("tests")
	err = errors.Join(err, servers.stop())
	if ctx.Err() != nil {
		return err
	}
	err = errors.Join(err, results.report(os.Stdout, o, clock, servers.cpu))
	after, sumsErr := sums(".")
	return errors.Join(err, sumsErr, unchanged(before, after))
}

// announce prints what will run and how long it takes.
func announce(o options) {
	times := map[int]string{1: "a minute, three with a cold build cache", 2: "four minutes, six with a cold build cache", 3: "half an hour"}
	what := map[int]string{1: "the tests that need no server", 2: "the tests, on Postgres, Redis and RabbitMQ that this command starts", 3: "the tests and the nightly tests"}
	fmt.Printf("test: runs %s, %d packages at a time on %d CPUs", what[o.tier], atOnce(o), runtime.NumCPU())
	if len(o.packages) == 0 && !o.race {
		fmt.Printf("; takes about %s", times[o.tier])
	}
	fmt.Println()
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

// fromRoot returns patterns of packages that are relative to the current folder as relative to root.
func fromRoot(root string, patterns []string) ([]string, error) {
	here, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	var found []string
	for _, pattern := range patterns {
		if pattern == "." || pattern == ".." || strings.HasPrefix(pattern, "./") || strings.HasPrefix(pattern, "../") {
			path, err := filepath.Rel(root, filepath.Join(here, pattern))
			if err != nil {
				return nil, err
			}
			pattern = "./" + filepath.ToSlash(path)
		}
		found = append(found, pattern)
	}
	return found, nil
}

// download downloads the modules that the tests need.
func download(ctx context.Context) error {
	_, err := goCommand(ctx, "list", "-deps", "-test", "work")
	if err != nil && !certificates() {
		return fmt.Errorf("%w: a CA bundle, to download modules (install ca-certificates, or set SSL_CERT_FILE)", errUnusable)
	}
	return err
}

// compile builds every package with its tests, all but the last step, and returns the folders of the packages that have
// tests by their import paths.
func compile(ctx context.Context, o options) (map[string]string, error) {
	args := []string{"list", "-export", "-test", "-v", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}\t{{.Dir}}{{end}}"}
	if o.race {
		args = append(args, "-race")
	}
	patterns := o.packages
	if len(patterns) == 0 {
		patterns = []string{"work"}
	}
	cmd := exec.CommandContext(ctx, "go", append(args, patterns...)...)
	progress := newProgress(os.Stderr)
	cmd.Stderr = progress
	out, err := cmd.Output()
	progress.stop()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	packages := map[string]string{}
	for line := range strings.Lines(string(out)) {
		name, dir, ok := strings.Cut(strings.TrimSpace(line), "\t")
		if ok && !strings.Contains(name, " ") {
			packages[name] = dir
		}
	}
	if len(packages) == 0 {
		return nil, errors.New("no package has tests")
	}
	return packages, nil
}

// goCommand runs the go command and returns its output. The error output is shown.
func goCommand(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go %s: %w", args[0], err)
	}
	return string(out), nil
}

// clock collects how long the phases take.
type clock struct {
	began, last time.Time
	phases      []phase
}

type phase struct {
	name string
	took time.Duration
}

func newClock() *clock { return &clock{began: time.Now(), last: time.Now()} }

// done ends a phase and prints its time.
func (c *clock) done(name string) {
	now := time.Now()
	fmt.Printf("%s: %.1f s\n", name, now.Sub(c.last).Seconds())
	c.phases = append(c.phases, phase{name, now.Sub(c.last)})
	c.last = now
}

// servers is internal/lab/servers in a process of its own. It starts while the tests are compiled.
type servers struct {
	dir  string // its files, and the measurements of the tests
	tier int
	cmd  *exec.Cmd
	hold io.Closer     // the servers end when it closes
	cpu  time.Duration // of the servers, once stopped
}

// The files that report to the tests how the start went.
const (
	environmentFile = "environment"
	failedFile      = "failed"
)

// environment is the file with the servers' variables, one per line. It appears when the servers answer.
func (s *servers) environment() string { return filepath.Join(s.dir, environmentFile) }

// await waits until the servers answer and returns their variables. The time depends on how much must be installed.
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
