// Command matrix runs the suites of the adapters against every version of their servers for which Debian has packages:
//
//	go run ./internal/lab/matrix [RELEASE…]
//
// As root on Debian or Ubuntu it makes a small system of each release with debootstrap, in a cache folder that later runs
// use again. It installs the servers there, and runs the suites inside with this machine's Go, on servers that the tests
// start. The versions in the table are the answers of the servers. Without arguments it runs on every release and writes
// internal/lab/matrix/report.md; a test compares README and CI with that report. It exits with 1 if a suite failed.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/apt"
	"github.com/holdfast-go/holdfast/internal/lab/provenance"
	"github.com/holdfast-go/holdfast/internal/lab/versions"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// exitUnusable is the exit code if a required program or right is missing.
const exitUnusable = 2

// reportFile is the path of the committed table in the repository.
const reportFile = "internal/lab/matrix/report.md"

// release is a version of Debian.
type release struct {
	name     string
	packages []string
}

// releases cover, for each server, each version that Debian maintains or is about to.
var releases = []release{
	{"bookworm", []string{"postgresql", "pgbouncer", "redis-server", "rabbitmq-server", "nats-server"}},
	{"trixie", []string{"postgresql", "pgbouncer", "redis-server", "valkey-server", "rabbitmq-server", "nats-server"}},
	{"forky", []string{"postgresql", "pgbouncer", "redis-server", "valkey-server", "rabbitmq-server", "nats-server"}},
}

func main() {
	inside := flag.String("inside", "", "run the suites of these `products` here, and print the results as JSON")
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

// run runs on the named releases. Without names it runs on all and writes the report.
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
	for i, r := range chosen { // in parallel: their tests often wait
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

// machine has the folders of this machine that the releases use, under the same names.
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
	// The releases have no network to download modules.
	if out, err := exec.Command("go", "list", "-deps", "-test", "work").CombinedOutput(); err != nil {
		return machine{}, fmt.Errorf("go list: %w\n%s", err, out)
	}
	return m, nil
}

const (
	mirror = "http://deb.debian.org/debian"
	// script is debootstrap's script for every release since stretch. A release may be newer than this machine's
	// debootstrap.
	script = "/usr/share/debootstrap/scripts/sid"
	// valkeyFirst is a folder in which Valkey has the name of Redis.
	valkeyFirst = "/opt/valkey"
	// stopPatience is how long the suites may take to stop their servers.
	stopPatience = time.Minute
)

// runOn runs the suites on the servers of a release, whose system is below root.
func (m machine) runOn(ctx context.Context, r release, root string) ([]outcome, error) {
	var all, more []outcome
	var err, failed error
	var running sync.WaitGroup
	running.Go(func() { all, err = m.runIn(ctx, root, "", postgres, redis, rabbitmq, nats) })
	if slices.Contains(r.packages, "valkey-server") {
		running.Go(func() { more, failed = m.runIn(ctx, root, valkeyFirst+":", redis) })
	}
	running.Wait()
	if err := errors.Join(err, failed); err != nil {
		return nil, fmt.Errorf("%s: %w", r.name, err)
	}
	all = append(all, more...)
	for i := range all {
		all[i].Release = r.name
	}
	return all, nil
}

// prepare makes the system of a release, or updates the system of an earlier run.
func (r release) prepare(ctx context.Context) (root string, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	root = filepath.Join(cache, "holdfast", "releases", r.name)
	if _, err := os.Stat(root); errors.Is(err, fs.ErrNotExist) {
		if err := debootstrap(ctx, r.name, root); err != nil {
			return "", err
		}
	} else if err != nil {
		return "", err
	}
	settings := filepath.Join(root, "etc/apt/apt.conf.d/late-mirror") // the package lists of a future release expire within days
	if err := os.WriteFile(settings, []byte("Acquire::Check-Valid-Until \"false\";\n"), 0o644); err != nil {
		return "", err
	}
	fmt.Fprintln(os.Stderr, "matrix:", r.name, "gets", strings.Join(r.packages, ", "))
	if err := apt.InstallBelow(ctx, root, r.packages...); err != nil {
		return "", err
	}
	if !slices.Contains(r.packages, "valkey-server") {
		return root, nil
	}
	if err := os.MkdirAll(filepath.Join(root, valkeyFirst), 0o755); err != nil {
		return "", err
	}
	err = os.Symlink("/usr/bin/valkey-server", filepath.Join(root, valkeyFirst, "redis-server"))
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return root, err
}

// debootstrap makes a system in root. root only appears when it is complete.
func debootstrap(ctx context.Context, name, root string) error {
	if _, err := exec.LookPath("debootstrap"); err != nil {
		if !apt.CanInstall() {
			return errors.New("install debootstrap, and run this as root")
		}
		if err := apt.Install(ctx, "debootstrap"); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(root), 0o755); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "matrix: debootstrap", name)
	unfinished := root + ".unfinished"
	if err := os.RemoveAll(unfinished); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, "debootstrap", "--variant=minbase", name, unfinished, mirror, script).CombinedOutput()
	if err != nil {
		return fmt.Errorf("debootstrap: %w\n%s", err, out)
	}
	return os.Rename(unfinished, root)
}

// enter runs the arguments after "--" inside a system. The mounts are in a namespace and end with it.
const enter = `
root=$1; shift
mount -t proc proc "$root/proc"
mkdir -p "$root/dev/shm"
mount -t tmpfs tmpfs "$root/dev/shm"
while [ "$1" != -- ]; do
	mkdir -p "$root$1"
	mount --bind "$1" "$root$1"
	shift
done
shift
cd "$1"
dir=$1; shift
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$dir" "$@"`

// runIn runs the suites of some products in the system below root. path comes first in the PATH.
func (m machine) runIn(ctx context.Context, root, path string, products ...string) ([]outcome, error) {
	args := []string{
		"--mount", "sh", "-ec", enter, "sh", root, m.repository, m.goroot, m.modules, m.builds, "--", m.repository,
		filepath.Join(m.goroot, "bin", "go"), "run", "./internal/lab/matrix", "-inside", strings.Join(products, ","),
	}
	cmd := exec.CommandContext(ctx, "unshare", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) } // go run does not forward it
	cmd.WaitDelay = stopPatience
	cmd.Stderr = os.Stderr
	cmd.Env = []string{
		"HOME=/root", "LANG=C.UTF-8", "PATH=" + path + filepath.Join(m.goroot, "bin") + ":/usr/sbin:/usr/bin:/sbin:/bin",
		"GOMODCACHE=" + m.modules, "GOCACHE=" + m.builds, "GOFLAGS=-buildvcs=false", "GOTOOLCHAIN=local", "GOPROXY=off",
		"CGO_ENABLED=0", // the release has no C compiler
		"HOLDFAST_REQUIRE_SERVERS=1", testenv.PrivateVar + "=1",
	}
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	var outcomes []outcome
	return outcomes, json.Unmarshal(out, &outcomes)
}

// The products, as arguments.
const (
	postgres = "postgres"
	redis    = "redis"
	rabbitmq = "rabbitmq"
	nats     = "nats"
)

// suites are the packages that use a product.
var suites = map[string][]string{
	postgres: {
		"txretry", "txretry/pgtest", "outbox/outboxpgx", "inbox/inboxpgx", "idempotency/idempotencypgx",
		"expiry/expirypgx", "internal/pgnotify", "internal/pgprune", "internal/lab/databasesql",
	},
	redis:    {"outbox/outboxredis", "inbox/inboxredis", "idempotency/idempotencyredis", "ratelimit/ratelimitredis"},
	rabbitmq: {"outbox/outboxamqp", "inbox/inboxamqp", "internal/amqpconn"},
	nats:     {"modules/nats/outboxnats", "modules/nats/inboxnats"},
}

// outcome is the result of the suites on one server.
type outcome struct {
	Product, Version, Release string
	Suites                    []suite
}

// suite is the result of the tests of one package.
type suite struct {
	Package         string
	Passed, Skipped int
	Failed          []string
}

func (o outcome) failed() bool {
	return slices.ContainsFunc(o.Suites, func(s suite) bool { return len(s.Failed) > 0 })
}

// runInside runs the suites on this machine's servers.
func runInside(ctx context.Context, products []string) (int, error) {
	env := os.Environ()
	said := map[string][2]string{}
	for _, kind := range []testenv.Kind{testenv.Postgres, testenv.Redis, testenv.RabbitMQ, testenv.NATS} {
		s, err := testenv.Launch(ctx, kind)
		if err != nil {
			return exitUnusable, err
		}
		defer s.Close()
		product, version, err := versions.Ask(ctx, s)
		if err != nil {
			return exitUnusable, err
		}
		said[string(kind)] = [2]string{product, version}
		env = append(env, addresses(s)...)
	}
	var all []outcome
	for _, product := range products {
		o := outcome{Product: said[product][0], Version: said[product][1]}
		for _, name := range suites[product] {
			fmt.Fprintf(os.Stderr, "matrix: %s %s: %s\n", o.Product, o.Version, name)
			s, err := test(ctx, name, env)
			if err != nil {
				return exitUnusable, err
			}
			o.Suites = append(o.Suites, s)
		}
		all = append(all, o)
	}
	return 0, json.NewEncoder(os.Stdout).Encode(all)
}

// addresses returns the environment variables with a server's address for tests.
func addresses(s *testenv.Server) []string {
	switch s.Kind() {
	case testenv.Postgres:
		return []string{testenv.PostgresVar + "=" + s.URL()}
	case testenv.Redis:
		return []string{testenv.RedisVar + "=" + s.URL()}
	case testenv.NATS:
		return []string{testenv.NATSVar + "=" + s.URL()}
	default:
		return []string{testenv.AMQPVar + "=" + s.URL(), testenv.AMQPAdminVar + "=" + s.AdminURL()}
	}
}

// test runs the tests of one package.
func test(ctx context.Context, name string, env []string) (suite, error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-json", "-vet=off", "-count=1", "-timeout=60m", "./"+name)
	cmd.Env, cmd.Stderr = env, os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return suite{}, err
	}
	s, err := read(name, out, os.Stderr)
	if failed := cmd.Wait(); failed != nil && len(s.Failed) == 0 {
		s.Failed = append(s.Failed, failed.Error())
	}
	if err == nil && s.Passed == 0 && len(s.Failed) == 0 {
		s.Failed = append(s.Failed, "no test was run")
	}
	return s, err
}

// event is a line of go test -json.
type event struct{ Action, Test, Output string }

// read counts the tests, without subtests, and prints the output of failed ones.
func read(name string, events io.Reader, log io.Writer) (suite, error) {
	s, said := suite{Package: name}, map[string]string{}
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return s, fmt.Errorf("%s: %q: %w", name, lines.Text(), err)
		}
		test, _, part := strings.Cut(e.Test, "/")
		said[test] += e.Output
		switch {
		case part:
		case e.Action == "pass" && test != "":
			s.Passed++
		case e.Action == "skip" && test != "":
			s.Skipped++
		case e.Action == "fail" && test != "":
			s.Failed = append(s.Failed, test)
			fmt.Fprint(log, said[test])
		case e.Action == "fail" && len(s.Failed) == 0:
			s.Failed = append(s.Failed, "the package")
			fmt.Fprint(log, said[test])
		}
	}
	return s, lines.Err()
}

// render returns the report. head describes its origin.
func render(head string, all []outcome) string {
	var text strings.Builder
	text.WriteString("# Versions\n\n" + head + "\n\nThe suites of the adapters run on servers of Debian's releases. The server itself reported its version; a\n" +
		"number is how many tests passed. Suites of PostgreSQL run behind the PgBouncer named too.\n")
	for _, product := range []string{"PostgreSQL", "Redis", "Valkey", "RabbitMQ", "NATS"} {
		table(&text, product, all)
	}
	return text.String()
}

// table has a row for each version of a product, and a column for each suite.
func table(text *strings.Builder, product string, all []outcome) {
	head := false
	for _, o := range all {
		if o.Product != product {
			continue
		}
		if !head {
			head = true
			fmt.Fprintf(text, "\n## %s\n\n| version | release |", product)
			for _, s := range o.Suites {
				fmt.Fprintf(text, " %s |", path.Base(s.Package))
			}
			fmt.Fprintf(text, "\n|---|---|%s\n", strings.Repeat("---|", len(o.Suites)))
		}
		fmt.Fprintf(text, "| %s | %s |", o.Version, o.Release)
		for _, s := range o.Suites {
			fmt.Fprintf(text, " %s |", s)
		}
		text.WriteByte('\n')
	}
}

func (s suite) String() string {
	if len(s.Failed) > 0 {
		return "failed: " + strings.Join(s.Failed, ", ")
	}
	if s.Skipped > 0 {
		return fmt.Sprintf("%d passed, %d skipped", s.Passed, s.Skipped)
	}
	return fmt.Sprintf("%d passed", s.Passed)
}

// tested returns the versions in a report, in the words of the README. All products except PostgreSQL have a minor version.
func tested(report string) []string {
	var names []string
	for _, part := range strings.Split(report, "\n## ")[1:] {
		product, rows, _ := strings.Cut(part, "\n")
		var versions []string
		for line := range strings.Lines(rows) {
			cells := strings.Split(line, " | ")
			parts := strings.Split(strings.TrimPrefix(cells[0], "| "), ".")
			if len(cells) < 3 || len(parts) < 2 || parts[0] == "" {
				continue // not a server's row
			}
			version := parts[0]
			if product != "PostgreSQL" {
				version += "." + parts[1]
			}
			if !slices.Contains(versions, version) {
				versions = append(versions, version)
			}
		}
		names = append(names, product+" "+list(versions))
	}
	return names
}

// list joins words as "a, b and c".
func list(words []string) string {
	last := len(words) - 1
	if last < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " and " + words[last]
}
