// Command chaos injects faults into the ticket shop of examples/reservation, and checks that it keeps its promises:
//
//	go run ./internal/lab/chaos [-seeds N] [-seed S] [-minutes M] [-only kind,kind] [-broker=nats] [-calm] [-out DIR]
//
// Each seed starts its own servers, primaries and standbys, two processes of each role and some clients. It injects every
// kind of fault into every role, server and standby that can have it. The seed chooses the order and the durations: -seed S
// repeats these choices, though not the exact moments. A whole seed takes about 20 minutes.
//
// After each fault the command measures the recovery, waits until nothing is under way, and compares the answers of the
// clients with the audit in the database. A seed ends at its first finding. The command runs for an hour, or for N seeds. As
// root on Debian and Ubuntu it installs missing programs. With -out it writes report.md, next to the logs of seeds with
// findings.
//
// It exits with 1 if anything was lost, doubled or stuck, if a request got an invalid answer, if a process ended by itself,
// if more was admitted than a limit allows, or if a whole seed denied nothing. Recoveries slower than the goal are counted
// on the last line. They change the exit code only with -calm, because a loaded machine can cause them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9/logging"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
	"github.com/holdfast-go/holdfast/internal/lab/provenance"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The exit codes.
const (
	exitFound    = 1
	exitUnusable = 2
)

type flags struct {
	seeds             int
	seed              uint64
	minutes           float64
	only, out, before string
	broker            string
	calm              bool
}

func main() {
	var f flags
	flag.IntVar(&f.seeds, "seeds", 0, "how many `seeds` to run, regardless of -minutes")
	flag.Uint64Var(&f.seed, "seed", 0, "the one seed to run, or the first of several (default: random)")
	flag.Float64Var(&f.minutes, "minutes", 60, "how long to start new faults")
	flag.StringVar(&f.only, "only", "", "the `kinds` of faults, separated by commas (default all)")
	flag.StringVar(&f.broker, "broker", string(testenv.RabbitMQ), "rabbitmq or nats")
	flag.StringVar(&f.out, "out", "", "a `folder` for the report and for logs")
	flag.StringVar(&f.before, "previous", "HEAD~20", "the `commit` that rolling deploys start from")
	flag.BoolVar(&f.calm, "calm", false, "also fail if a recovery takes longer than the goal; needs an idle machine")
	flag.Parse()
	logging.Disable() // of go-redis: the callers get its errors anyway
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	report, err := run(ctx, f)
	stop()
	shop.Remove()
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(exitUnusable)
	case report.failed() || f.calm && report.slow() > 0:
		os.Exit(exitFound)
	}
}

func run(ctx context.Context, f flags) (Report, error) {
	chosen, err := kindsNamed(f.only)
	if err != nil {
		return Report{}, err
	}
	if !slices.Contains([]testenv.Kind{testenv.RabbitMQ, testenv.NATS}, testenv.Kind(f.broker)) {
		return Report{}, fmt.Errorf("-broker is %q, must be rabbitmq or nats", f.broker)
	}
	r := Report{Head: provenance.Head(command(os.Args[1:]), time.Now())}
	if err := getTools(ctx); err != nil {
		return Report{}, err
	}
	r.Missing = missing(chosen) // after getTools
	o := options{kinds: chosen, whole: f.only == "", broker: testenv.Kind(f.broker), log: os.Stdout}
	if o.binary, err = shop.Binary(); err != nil {
		return Report{}, err
	}
	if o.previous, err = shop.BinaryOf(ctx, f.before); err != nil {
		r.Missing["deploy"] = fmt.Sprintf("no version before this one: %v", err)
	} else if r.Previous, err = shop.Commit(ctx, f.before); err != nil {
		return Report{}, err
	}
	return r, r.run(ctx, f, o)
}

// command returns the command line of this run.
func command(args []string) string {
	return strings.Join(append([]string{"go run ./internal/lab/chaos"}, args...), " ")
}

// run runs seeds until there are enough or time is up. It writes the report after each.
func (r *Report) run(ctx context.Context, f flags, o options) error {
	if f.seeds == 0 {
		o.deadline = time.Now().Add(time.Duration(f.minutes * float64(time.Minute)))
	}
	seed := f.seed
	for n := 0; ctx.Err() == nil; n++ {
		if f.seeds > 0 && n >= f.seeds || f.seeds == 0 && time.Now().After(o.deadline) || f.seed != 0 && f.seeds == 0 && n > 0 {
			break
		}
		if f.seed == 0 {
			seed = uint64(rand.Uint32())
		}
		if f.out != "" {
			o.out = filepath.Join(f.out, "seed-"+strconv.FormatUint(seed, 10))
		}
		fmt.Fprintf(o.log, "seed %d\n", seed)
		s, err := play(ctx, seed, o)
		if err != nil {
			s.Error = err.Error()
			fmt.Fprintln(o.log, "the lab itself:", err)
		}
		s.Seed = seed
		r.Seeds = append(r.Seeds, s)
		if f.out != "" {
			if err := r.write(f.out); err != nil {
				return err
			}
		}
		seed++
	}
	fmt.Fprint(o.log, r.markdown())
	if len(r.Seeds) == 0 {
		return errors.New("no seed ran")
	}
	fmt.Fprintln(o.log, r.verdict())
	return nil
}

// patience limits the wait for a recovery, and then for quiet.
const patience = 90 * time.Second

// director runs one seed: it injects faults into a system under load, and audits after each.
type director struct {
	s      *system
	watch  *harness.Watch
	greedy *greedy
	log    io.Writer
	// clockWentBack is set by the first fault of Postgres' clock, because each of these moves the clock back at its start or
	// end.
	clockWentBack bool
}

// options are the options of a run.
type options struct {
	kinds    []kind
	whole    bool // kinds has all kinds
	broker   testenv.Kind
	binary   string
	previous string // "" for none
	out      string // folder for logs, "" for none
	log      io.Writer
	deadline time.Time // no fault begins later; zero for none
}

// play runs one seed. The error is a failure of the lab. The report has the failures of the shop.
func play(ctx context.Context, seed uint64, o options) (report SeedReport, err error) {
	began := time.Now()
	clocks := slices.ContainsFunc(o.kinds, func(k kind) bool { return k.name == "clock" }) && noClocks() == ""
	s, err := openSystem(ctx, o.binary, o.broker, clocks)
	defer func() { err = errors.Join(err, s.close()) }()
	if err != nil {
		return report, err
	}
	d := &director{s: s, log: o.log}
	if err := d.open(ctx, seed); err != nil {
		return report, err
	}
	defer d.watch.Close()
	defer func() { d.greedy.stop() }()
	var last harness.Judged
	dealer := &dealer{s: s, rng: rand.New(rand.NewPCG(seed, 1)), previous: o.previous}
	report.Seed = seed
	for _, f := range dealer.dealAll(o.kinds) {
		if !o.deadline.IsZero() && time.Now().After(o.deadline) {
			report.Cut = true
			break
		}
		var outcome harness.Outcome
		outcome, last, err = d.suffer(ctx, f)
		report.Outcomes = append(report.Outcomes, outcome)
		fmt.Fprintln(o.log, outcome)
		if err != nil {
			err = fmt.Errorf("%s, %s: %w", f.kind, f.target, err)
		}
		if err != nil || len(outcome.Findings) > 0 {
			if o.out != "" {
				err = errors.Join(err, s.logs(o.out))
			}
			break // later findings could belong to this fault
		}
	}
	if o.whole && err == nil {
		report.whole(last.History.Limit)
	}
	report.count(last, time.Since(began))
	return report, err
}

// open starts the watch, and the user who exceeds the limit.
func (d *director) open(ctx context.Context, seed uint64) (err error) {
	subject := harness.Subject{
		Binary: d.s.binary, APIs: d.s.apis, DB: d.s.pool, Broker: d.s.observedBroker(),
		Hold: hold, Lost: d.s.losses, Seed: seed, Patience: patience,
		Amend: func(h *audit.History) { h.Limit, h.ClockWentBack = d.greedy.told(), d.clockWentBack },
	}
	for _, p := range d.s.processes {
		subject.Processes = append(subject.Processes, p.Process)
	}
	if d.watch, err = harness.NewWatch(ctx, subject); err != nil {
		return err
	}
	d.greedy = newGreedy(d.s.apis)
	d.greedy.start(ctx)
	return d.s.writeDefinitions(ctx)
}

func (d *director) suffer(ctx context.Context, f fault) (harness.Outcome, harness.Judged, error) {
	d.clockWentBack = d.clockWentBack || f.setsPostgresClock()
	o, j, err := d.watch.Suffer(ctx, harness.Fault{
		Kind: f.kind, Target: f.target, Begin: f.begin, Lasts: f.lasts, End: f.end, After: f.after,
		Over: func(since time.Time) { d.greedy.excuse(since, f.forgets) },
	})
	if len(o.Findings) > 0 {
		fmt.Fprintln(d.log, d.s.sessions(ctx))
	}
	return o, j, err
}
