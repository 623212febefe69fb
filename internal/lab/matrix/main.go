// Command matrix runs the suites of the adapters against every version of their servers that Debian
// has packages of:
//
//	go run ./internal/lab/matrix [RELEASE…]
//
// As root on Debian or Ubuntu it makes a small system of each release by debootstrap, in a cache
// folder that later runs use again, installs the servers there, and runs the suites inside with this
// machine's Go: on servers that the tests start, as anywhere. What the servers answer when asked for
// their version is what the table names. Without arguments it runs on every release and writes
// internal/lab/matrix/report.md, which the README and CI are held to. It exits with 1 if a suite failed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/provenance"
)

// exitUnusable is the exit code when something is missing that the command cannot get.
const exitUnusable = 2

// reportFile is where the table is committed, in the repository.
const reportFile = "internal/lab/matrix/report.md"

// release is a version of Debian.
type release struct {
	name     string
	packages []string
}

// releases have each server at least once in each version that Debian maintains or is about to.
var releases = []release{
	{"bookworm", []string{"postgresql", "pgbouncer", "redis-server", "rabbitmq-server"}},
	{"trixie", []string{"postgresql", "pgbouncer", "redis-server", "valkey-server", "rabbitmq-server"}},
	{"forky", []string{"postgresql", "pgbouncer", "redis-server", "valkey-server", "rabbitmq-server"}},
}

func main() {
	inside := flag.String("inside", "", "run the suites of these `products` here, and print what came of them as JSON")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	code, err := 0, error(nil)
	if *inside != "" {
		code, err = runInside(ctx, strings.Split(*inside, ","))
	} else {
		code, err = run(ctx, flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "matrix:", err)
	}
	os.Exit(code)
}

// run runs on the named releases, or on all and writes the report.
func run(ctx context.Context, names []string) (int, error) {
	chosen := slices.DeleteFunc(slices.Clone(releases), func(r release) bool { return len(names) > 0 && !slices.Contains(names, r.name) })
	if len(chosen) < len(names) {
		return exitUnusable, errors.New("usage: go run ./internal/lab/matrix [bookworm] [trixie] [forky]")
	}
	head := provenance.Head("make matrix", time.Now())
	here, err := thisMachine()
	if err != nil {
		return exitUnusable, err
	}
	roots := make([]string, len(chosen))
	for i, r := range chosen { // one after the other: apt-get of this machine has one lock
		if roots[i], err = r.prepare(ctx); err != nil {
			return exitUnusable, fmt.Errorf("%s: %w", r.name, err)
		}
	}
	outcomes, errs := make([][]outcome, len(chosen)), make([]error, len(chosen))
	var running sync.WaitGroup
	for i, r := range chosen { // side by side: their tests often wait
		running.Go(func() { outcomes[i], errs[i] = here.runOn(ctx, r, roots[i]) })
	}
	running.Wait()
	if err := errors.Join(errs...); err != nil {
		return exitUnusable, err
	}
	all := slices.Concat(outcomes...)
	text := render(head, all)
	fmt.Print(text)
	if len(names) == 0 {
		if err := os.WriteFile(filepath.Join(here.repository, reportFile), []byte(text), 0o644); err != nil {
			return exitUnusable, err
		}
	}
	if slices.ContainsFunc(all, outcome.failed) {
		return 1, nil
	}
	return 0, nil
}

// machine is what the releases use of this one: folders of the same name in both.
type machine struct {
	repository, goroot, modules, builds string
}

func thisMachine() (machine, error) {
	out, err := exec.Command("go", "env", "GOWORK", "GOROOT", "GOMODCACHE", "GOCACHE").Output()
	if err != nil {
		return machine{}, fmt.Errorf("go env: %w", err)
	}
	lines := strings.Split(string(out), "\n")
	m := machine{filepath.Dir(lines[0]), lines[1], lines[2], lines[3]}
	// In the releases there is no network that modules could come from.
	if out, err := exec.Command("go", "list", "-deps", "-test", "work").CombinedOutput(); err != nil {
		return machine{}, fmt.Errorf("go list: %w\n%s", err, out)
	}
	return m, nil
}
