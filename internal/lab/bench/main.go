// Command bench compares this repository's packages with their peers and with the bare clients, on one machine and in
// one run:
//
//	GOWORK=off go -C internal/lab/bench run . txretry
//	GOWORK=off go -C internal/lab/bench run . all -rounds=5 -report=../performance
//
// The second command runs every workload except scale and writes the report as Markdown and JSON. It keeps the workloads
// of an existing report that it does not measure.
//
// It uses the servers in HOLDFAST_TEST_POSTGRES_URL and the related variables. If a variable is not set, it starts a
// private server of the installed binary. The workloads shop and scale always have private servers.
//
// The contenders of a table take turns, round after round, so that other load on the machine affects all of them. Each
// figure is the median [least .. most] of the rounds. A ratio is the median of the ratios within a round. The list of
// goals comes last.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/provenance"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// workload is one subject of comparison.
type workload struct {
	name  string
	parts []part
}

// part is a piece of a workload that can run alone.
type part struct {
	name string
	run  func(ctx context.Context, b *bench)
}

func workloads() []workload {
	return []workload{txretryWorkload(), outboxWorkload(), inboxWorkload(), expiryWorkload(), idempotencyWorkload(), ratelimitWorkload(), natsWorkload(), shopWorkload(), scaleWorkload()}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	b := &bench{out: out}
	var only, save string
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	secs := flags.Float64("secs", 2, "length of one run in `seconds`")
	flags.IntVar(&b.rounds, "rounds", 3, "`number` of rounds")
	flags.IntVar(&b.messages, "messages", 100_000, "`number` of messages that one run drains, where it does so")
	flags.IntVar(&b.rows, "rows", 2_000_000, "`number` of rows in a table of which a tenth is due, at least 2000")
	flags.StringVar(&only, "part", "", "run only the part of this `name`")
	flags.StringVar(&save, "report", "", "write the results to `file`.md and .json, next to the other workloads")

	names, err := parse(flags, args)
	if errors.Is(err, flag.ErrHelp) {
		usage(flags, out)
		return nil
	}
	b.length = time.Duration(*secs * float64(time.Second))
	if err == nil && (b.length <= 0 || b.rounds < 1 || b.messages < 1 || b.rows < 2000) {
		err = errors.New("-secs, -rounds and -messages must be positive, -rows at least 2000")
	}
	if err != nil {
		return err
	}
	chosen, err := choose(names, only)
	if err != nil {
		return err
	}
	b.report = &report{}
	var earlier report
	if save != "" {
		if earlier, err = earlierReport(save + ".json"); err != nil {
			return err
		}
	}
	command := strings.Join(append([]string{"GOWORK=off go -C internal/lab/bench run ."}, args...), " ")
	commit := provenance.Commit() // before the report changes files
	defer func() { err = errors.Join(err, b.close()) }()
	var failed error
	for _, w := range chosen {
		b.report.Runs = append(b.report.Runs, ran{w.name, command, commit, time.Now(), b.rounds, provenance.Machine() + loadAverage()})
		if err := b.runAll(ctx, w); err != nil {
			fmt.Fprintln(out, "\nfailed:", err)
			failed = errors.Join(failed, err)
		}
		if ctx.Err() != nil {
			return failed
		}
		if save != "" { // an interrupted run keeps its results
			if err := b.report.beside(earlier).save(save); err != nil {
				return err
			}
		}
	}
	var goals strings.Builder
	b.report.goals(&goals)
	fmt.Fprint(out, goals.String())
	return failed
}

// loadAverage returns the load of the machine in the last minute, before the workload: other work widens the ranges.
func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return ""
	}
	load, _, _ := strings.Cut(string(text), " ")
	return ", load " + load
}

func (b *bench) runAll(ctx context.Context, w workload) (err error) {
	b.workload = w.name
	defer func() { err = errors.Join(err, b.endWorkload()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // also ends the goroutines of a failed part
	defer func() {
		switch r := recover().(type) {
		case nil:
		case failure:
			err = fmt.Errorf("%s, %s: %w", w.name, b.at, r.error)
		default:
			panic(r)
		}
	}()
	for _, p := range w.parts {
		b.at = p.name
		p.run(ctx, b)
	}
	return nil
}

// failure is the panic with which check and must end a part. Only the goroutine of the part may use them.
type failure struct{ error }

func check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

// parse accepts flags before and after the names.
func parse(flags *flag.FlagSet, args []string) (names []string, err error) {
	for {
		if err := flags.Parse(args); err != nil {
			return nil, err
		}
		if flags.NArg() == 0 {
			return names, nil
		}
		names, args = append(names, flags.Arg(0)), flags.Args()[1:]
	}
}

// everything names all workloads that compare contenders. Scale only measures.
const everything, scaleOnly = "all", "scale"

// choose returns the workloads of that name with all their parts, or with the chosen part.
func choose(names []string, only string) ([]workload, error) {
	known, all := []string{everything}, workloads()
	for _, w := range all {
		known = append(known, w.name)
		if len(names) == 1 && names[0] == w.name {
			return w.only(only)
		}
	}
	if len(names) != 1 || names[0] != everything {
		return nil, fmt.Errorf("name one workload of: %s", strings.Join(known, ", "))
	}
	if only != "" {
		return nil, fmt.Errorf("%s has no parts", everything)
	}
	return slices.DeleteFunc(all, func(w workload) bool { return w.name == scaleOnly }), nil
}

// only returns the workload with the part of that name; "" means all parts.
func (w workload) only(name string) ([]workload, error) {
	var known []string
	for _, p := range w.parts {
		if p.name == name {
			w.parts = []part{p}
			return []workload{w}, nil
		}
		known = append(known, p.name)
	}
	if name != "" {
		return nil, fmt.Errorf("no part %q, %s has: %s", name, w.name, strings.Join(known, ", "))
	}
	return []workload{w}, nil
}

func usage(flags *flag.FlagSet, out io.Writer) {
	fmt.Fprintf(out, "usage: bench WORKLOAD [FLAG…]\n  %s\n", everything)
	for _, w := range workloads() {
		var parts []string
		for _, p := range w.parts {
			parts = append(parts, p.name)
		}
		fmt.Fprintf(out, "  %s, parts: %s\n", w.name, strings.Join(parts, ", "))
	}
	flags.SetOutput(out)
	flags.PrintDefaults()
}

// maxConns is enough for one connection per goroutine in every workload.
const maxConns = 40

// servers are the servers that a workload uses.
type servers struct {
	urls     map[testenv.Kind]string
	launched []*testenv.Server // the private servers, which end with the command
	endings  []func() error    // clean-up of the workload
}

// close ends the rest of a workload, then the servers.
func (b *bench) close() error {
	errs := []error{b.endWorkload()}
	for _, s := range slices.Backward(b.servers.launched) {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// endWorkload ends everything the workload started, in reverse order. All workloads together would need more connections
// than Postgres accepts.
func (b *bench) endWorkload() error {
	var errs []error
	for _, end := range slices.Backward(b.servers.endings) {
		errs = append(errs, end())
	}
	b.servers.endings = nil
	return errors.Join(errs...)
}

// atEnd registers f to be called when the workload has ended.
func (b *bench) atEnd(f func() error) { b.servers.endings = append(b.servers.endings, f) }

// server returns the address of a server: the one in the environment, or a private instance, which it starts on first
// use.
func (b *bench) server(ctx context.Context, kind testenv.Kind, variable string) string {
	if url := os.Getenv(variable); url != "" {
		return url
	}
	if url := b.servers.urls[kind]; url != "" {
		return url
	}
	var extra []string
	if kind == testenv.RabbitMQ { // the tests' memory limit is too low for long queues
		extra = append(extra, "vm_memory_high_watermark.absolute = 8GB")
	}
	s, err := testenv.Launch(ctx, kind, extra...)
	if errors.Is(err, testenv.ErrNotInstalled) {
		check(fmt.Errorf("%w: set %s, or put `go run ./internal/lab/servers --` before the command", err, variable))
	}
	check(err)
	b.servers.launched = append(b.servers.launched, s)
	if b.servers.urls == nil {
		b.servers.urls = map[testenv.Kind]string{}
	}
	b.servers.urls[kind] = s.URL()
	return s.URL()
}

// launch starts a private server.
func (b *bench) launch(ctx context.Context, kind testenv.Kind, extra ...string) *testenv.Server {
	s := must(testenv.Launch(ctx, kind, extra...))
	b.servers.launched = append(b.servers.launched, s)
	return s
}

// postgres returns a pool whose tables are in their own schema. It lasts as long as the workload.
func (b *bench) postgres(ctx context.Context) *pgxpool.Pool {
	url := b.server(ctx, testenv.Postgres, testenv.PostgresVar)
	schema := fmt.Sprintf("holdfast_bench_%d", time.Now().UnixNano())
	check(execOn(ctx, url, "CREATE SCHEMA "+schema))
	b.atEnd(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		return execOn(ctx, url, "DROP SCHEMA "+schema+" CASCADE")
	})
	cfg := must(pgxpool.ParseConfig(url))
	cfg.MaxConns = maxConns
	cfg.ConnConfig.RuntimeParams["search_path"] = schema
	return b.pool(ctx, cfg)
}

// rabbitmq returns the address of a broker.
func (b *bench) rabbitmq(ctx context.Context) string {
	return b.server(ctx, testenv.RabbitMQ, testenv.AMQPVar)
}

// pool returns a pool that is closed at the end.
func (b *bench) pool(ctx context.Context, cfg *pgxpool.Config) *pgxpool.Pool {
	pool := must(pgxpool.NewWithConfig(ctx, cfg))
	b.atEnd(func() error {
		pool.Close()
		return nil
	})
	return pool
}

func execOn(ctx context.Context, url, sql string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}
