// Command clusters tests the ticket shop on clusters:
//
//	go run ./internal/lab/clusters [-run PATTERN]
//
// It builds hosts from network namespaces. Three of them have a RabbitMQ of three nodes with quorum queues, a Redis Cluster
// of six, and a Postgres with a synchronous standby. Two more have each role of the shop, behind a PgBouncer each. While
// customers buy, nodes are killed, cut off and promoted, and slots moved. After each fault it measures the recovery, and
// compares all answers, all changes and all messages at the broker. It writes internal/lab/clusters/report.md. It exits with
// 1 if something was lost, doubled, out of order, or did not recover. With -run only the faults with a matching name happen,
// and the report is printed.
//
// It needs root on Debian or Ubuntu, where it installs missing programs. Everything is in its own network namespace, and
// ends with it.
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
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/apt"
	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/provenance"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/lab/versions"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// exitUnusable is the exit code if a required program or right is missing.
const exitUnusable = 2

// reportFile is the path of the committed report in the repository.
const reportFile = "internal/lab/clusters/report.md"

// packages are the required Debian packages.
var packages = []string{"iproute2", "util-linux", "postgresql", "pgbouncer", "redis-server", "rabbitmq-server"}

func main() {
	runtime.LockOSThread() // the child dies with the thread that starts it; the main thread never ends
	inside := flag.String("inside", "", "run in this namespace, and write the report to this `file`")
	binary := flag.String("shop", "", "with -inside: the shop's `binary`, because building it needs a network")
	pattern := flag.String("run", "", "only the faults whose name matches this regular `expression`")
	flag.Parse()
	chosen, err := regexp.Compile(*pattern)
	if err != nil {
		fmt.Fprintln(os.Stderr, "clusters:", err)
		os.Exit(exitUnusable)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	code := 0
	if *inside != "" {
		code, err = try(ctx, chosen, *binary, *inside)
	} else {
		code, err = isolated(ctx, *pattern)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "clusters:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// isolated runs this command in its own network namespace.
func isolated(ctx context.Context, pattern string) (int, error) {
	out, err := exec.Command("go", "env", "GOWORK").Output()
	if err != nil {
		return exitUnusable, fmt.Errorf("go env: %w", err)
	}
	report := filepath.Join(filepath.Dir(strings.TrimSpace(string(out))), reportFile)
	if missing := apt.Missing(packages...); len(missing) > 0 {
		if !apt.CanInstall() {
			return exitUnusable, fmt.Errorf("install %s, and run this as root", strings.Join(missing, ", "))
		}
		if err := apt.Install(ctx, missing...); err != nil {
			return exitUnusable, err
		}
	}
	if os.Geteuid() != 0 {
		return exitUnusable, errors.New("run this as root: it makes network namespaces")
	}
	self, err := os.Executable()
	if err != nil {
		return exitUnusable, err
	}
	defer shop.Remove()
	binary, err := shop.Binary() // here, because modules cannot be downloaded inside
	if err != nil {
		return exitUnusable, err
	}
	const names = `mkdir -p /run/netns; mount -t tmpfs tmpfs /run/netns; exec "$@"` // names of namespaces, visible only here
	cmd := exec.Command("unshare", "--net", "--mount", "sh", "-ec", names, "sh", self, "-inside", report, "-shop", binary, "-run", pattern)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	testenv.DieWithParent(cmd.SysProcAttr)
	if err := cmd.Start(); err != nil {
		return exitUnusable, err
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(syscall.SIGTERM) })
	defer stop()
	err = cmd.Wait()
	if ended := new(exec.ExitError); errors.As(err, &ended) {
		return max(1, ended.ExitCode()), nil
	}
	return 0, err
}

// try runs all faults, or the chosen ones, and writes the report.
func try(ctx context.Context, chosen *regexp.Regexp, binary, report string) (code int, err error) {
	began := time.Now()
	head := provenance.Head("make clusters", began)
	h, err := openHouse(ctx, 2)
	defer func() { err = errors.Join(err, h.close()) }()
	if err != nil {
		return exitUnusable, err
	}
	servers, err := h.versions(ctx)
	if err != nil {
		return exitUnusable, err
	}
	t, err := openTrial(ctx, h, binary)
	defer func() {
		if closed := t.close(); closed != nil {
			code, err = 1, errors.Join(err, closed)
		}
	}()
	if err != nil {
		t.tell(os.Stderr)
		return exitUnusable, err
	}
	v, err := t.run(ctx, chosen)
	if err != nil {
		return exitUnusable, err
	}
	text := render(head, servers, v, time.Since(began))
	fmt.Print(text)
	if len(v.faults) > 0 {
		code = 1
	}
	if len(v.outcomes) == 0 {
		return exitUnusable, fmt.Errorf("no fault has a name like %q", chosen)
	}
	if chosen.String() != "" {
		return code, nil
	}
	return code, os.WriteFile(report, []byte(text), 0o644)
}

// versions returns the versions of the servers.
func (h *house) versions(ctx context.Context) (all []string, err error) {
	for _, s := range []*testenv.Server{h.primary, h.redis[0], h.rabbit[0]} {
		product, version, err := versions.Ask(ctx, s)
		if err != nil {
			return nil, err
		}
		all = append(all, product+" "+version)
	}
	return all, nil
}

const introduction = `
Five hosts, each a network namespace with an address of its own: on three of them a RabbitMQ of
three nodes with quorum queues (` + "`pause_minority`" + `), a Redis Cluster of six (each primary with a replica on another host),
and a Postgres with a synchronous standby, whose address moves to the standby; on the other two each role of the
[ticket shop](../../../examples/reservation/README.md) once, behind a PgBouncer in transaction mode.
`

// render returns the report.
func render(head string, servers []string, v verdict, took time.Duration) string {
	var text strings.Builder
	fmt.Fprintf(&text, "# Clusters\n\n%s\n%s\nServers: %s. It took %.0f minutes.\n", head, introduction, strings.Join(servers, ", "), took.Minutes())
	text.WriteString(`
## Faults

Customers buy meanwhile. A number is
how many seconds after the end of the fault a symptom was seen for the last time; a fault with an end lasts ` + fmt.Sprint(outage) + `.
"Held meanwhile" are the seats that customers got while it lasted. The goal is that all is well after ` + fmt.Sprint(harness.Goal) + `.

| fault | held meanwhile | all |`)
	for _, s := range harness.Symptoms {
		fmt.Fprintf(&text, " %s |", s)
	}
	fmt.Fprintf(&text, "\n|---|---|---|%s\n", strings.Repeat("---|", len(harness.Symptoms)))
	for _, o := range v.outcomes {
		all := fmt.Sprintf("%.1f", o.Recovery)
		if o.Slow {
			all = "**" + all + "**"
		}
		fmt.Fprintf(&text, "| %s: %s | %d | %s |", o.Kind, o.Target, o.Held, all)
		for _, s := range harness.Symptoms {
			fmt.Fprintf(&text, " %.1f |", o.After[s])
		}
		text.WriteByte('\n')
	}
	text.WriteString(crashLines(v.crashes))
	fmt.Fprintf(&text, `
## What was kept

- The shop: %d requests, %d seats held by as many keys. Each answer was compared with the database, each reservation with its
  seats, each of its two messages with the read model.
- The broker, in the order of each reservation: %s.
`, v.requests, v.held, v.broker)
	if len(v.faults) == 0 {
		text.WriteString("\nNothing was lost, doubled or out of order within its key.\n")
	} else {
		text.WriteString("\nWrong:\n\n")
		for _, f := range v.faults {
			fmt.Fprintf(&text, "- %s\n", strings.ReplaceAll(f, "\n", "; "))
		}
	}
	return text.String()
}

// crashLines lists the faults during which PgBouncer ended by itself. That is not a fault of the shop, which must recover as
// usual.
func crashLines(crashes []crash) string {
	if len(crashes) == 0 {
		return "\nNo PgBouncer ended by itself.\n"
	}
	var text strings.Builder
	fmt.Fprintf(&text, "\nEnds of a PgBouncer by itself, after each of which the supervisor of its host started it again: %d\n\n", len(crashes))
	for _, c := range crashes {
		fmt.Fprintf(&text, "- on %s, in \"%s\": `%s`\n", c.host, c.during, c.said)
	}
	return text.String()
}
