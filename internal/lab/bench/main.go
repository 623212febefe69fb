// Command bench compares this repository's packages with the peers and with
// what the bare clients can do, on one machine and in one run:
//
//	go run ./internal/lab/bench txretry
//
// It uses the servers in HOLDFAST_TEST_POSTGRES_URL and its like, and starts
// private ones of the installed binaries where those are not set; shop and scale
// have private ones always. The contenders of a table take turns, round after round,
// so that what else the machine does hits all of them. Each figure is the median
// [least .. most] of the rounds; a ratio is the median of the ratios within one
// round. At the end stands which goals were met.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// workload is one subject of comparison.
type workload struct {
	name  string
	parts []part
}

// part is a piece of a workload that can be run alone.
type part struct {
	name string
	run  func(ctx context.Context, b *bench) error
}

func workloads() []workload {
	return []workload{txretryWorkload(), outboxWorkload(), inboxWorkload(), expiryWorkload(), idempotencyWorkload(), ratelimitWorkload(), shopWorkload(), scaleWorkload()}
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
	var only string
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	secs := flags.Float64("secs", 2, "length of one run in `seconds`")
	flags.IntVar(&b.rounds, "rounds", 3, "`number` of rounds")
	flags.IntVar(&b.messages, "messages", 100_000, "`number` of messages that one run drains, where it does so")
	flags.IntVar(&b.rows, "rows", 2_000_000, "`number` of rows in a table of which a tenth is due, at least 2000")
	flags.StringVar(&only, "part", "", "run only the part of that `name`")
	flags.StringVar(&b.profiles, "profile", "", "write a CPU profile of every row's last run into this `folder`")

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
	defer func() { err = errors.Join(err, b.close()) }()
	for _, p := range chosen {
		if err := p.run(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return b.printGoals()
}

// parse takes flags before and after the names.
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

// choose returns the parts of one workload, or the one of them that is asked for.
func choose(names []string, only string) ([]part, error) {
	var known []string
	for _, w := range workloads() {
		known = append(known, w.name)
		if len(names) != 1 || names[0] != w.name {
			continue
		}
		if only == "" {
			return w.parts, nil
		}
		var parts []string
		for _, p := range w.parts {
			if p.name == only {
				return []part{p}, nil
			}
			parts = append(parts, p.name)
		}
		return nil, fmt.Errorf("no part %q, %s has: %s", only, w.name, strings.Join(parts, ", "))
	}
	return nil, fmt.Errorf("name one workload of: %s", strings.Join(known, ", "))
}

func usage(flags *flag.FlagSet, out io.Writer) {
	fmt.Fprintln(out, "usage: bench WORKLOAD [FLAG…]")
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
