package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/apt"
	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// fault is one disturbance with its repair.
type fault struct {
	kind, target string
	begin        func(ctx context.Context) error
	// lasts is the time between begin and end.
	lasts time.Duration
	// end is nil if the fault is over as soon as it starts.
	end func(ctx context.Context) error
	// forgets is how many times the fault may make Redis lose counts of rate limits, completely or in part.
	forgets int
	// links are the links that the fault disturbs.
	links []*testenv.Proxy
	// after restores things that are not part of the recovery, such as a new standby. It runs during the recovery.
	after func(ctx context.Context) error
}

// setsPostgresClock reports whether the fault sets Postgres' clock, which decides when holds expire. Redis' clock does
// not.
func (f fault) setsPostgresClock() bool {
	return f.kind == "clock" && strings.HasPrefix(f.target, string(testenv.Postgres))
}

// kind is a kind of fault.
type kind struct {
	name, what string
	// deal returns the faults for a seed.
	deal func(d *dealer) []fault
	// missing returns the reason why this machine cannot have the kind; "" if it can.
	missing func() string
	// lacks returns the part of the kind that this machine cannot have, and the reason.
	lacks func() (what, why string)
}

// missing returns the kinds that this machine cannot have, completely or in part, with reasons.
func missing(chosen []kind) map[string]string {
	all := map[string]string{}
	for _, k := range chosen {
		if k.missing != nil && k.missing() != "" {
			all[k.name] = k.missing()
		}
		if k.lacks == nil {
			continue
		}
		if what, why := k.lacks(); what != "" {
			all[k.name+" of "+what] = why
		}
	}
	return all
}

// dealer chooses the faults of a seed.
type dealer struct {
	s   *system
	rng *rand.Rand
	// previous is the binary of the version to deploy from; "" for none.
	previous string
}

// kinds returns all kinds.
func kinds() []kind {
	return []kind{
		{name: "kill", what: "kill -9, and started again", deal: (*dealer).kills},
		{name: "stop", what: "SIGSTOP, and SIGCONT", deal: (*dealer).stops},
		{name: "restart", what: "asked to end, and started again", deal: (*dealer).restarts},
		{name: "failover", what: "the primary killed -9 and its standby promoted; Postgres synchronous, Redis as it always is", deal: (*dealer).failovers},
		{name: "failover-async", what: "Postgres again, its standby behind: the missing changes are lost, and counted", deal: (*dealer).asyncFailovers},
		{name: "cut", what: "connections reset, new ones refused", deal: (*dealer).cuts},
		{name: "delay", what: "every read late", deal: (*dealer).delays},
		{name: "half-open", what: "connections open, and silent forever", deal: (*dealer).halfOpens},
		{name: "lost-bytes", what: "requests arrive, answers are lost", deal: (*dealer).lostBytes},
		{name: "disk-full", what: "no room left: on Postgres' own disk, and RabbitMQ's alarm", deal: (*dealer).fullDisks, lacks: noDisk},
		{name: "memory-alarm", what: "RabbitMQ's alarm: publishers are blocked", deal: (*dealer).memoryAlarms},
		{name: "flush", what: "FLUSHALL of Redis", deal: (*dealer).flushes},
		{name: "read-only", what: "Redis a replica, as when an address moves too early; Postgres in read-only transactions", deal: (*dealer).readOnly},
		{name: "locks", what: "a table locked by another session", deal: (*dealer).locks},
		{name: "clock", what: "the clocks of Postgres or Redis jump", deal: (*dealer).clocks, missing: noClocks},
		{name: "deploy", what: "a rolling deploy to the previous version and back", deal: (*dealer).deploys},
		{name: "double", what: "two faults of two kinds at once", deal: (*dealer).doubles},
	}
}

// kindsNamed returns the kinds in a list of names; all for "".
func kindsNamed(names string) ([]kind, error) {
	all := kinds()
	if names == "" {
		return all, nil
	}
	var chosen []kind
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(all, func(k kind) bool { return k.name == name })
		if i < 0 {
			return nil, fmt.Errorf("there is no kind %q", name)
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// dealAll returns the faults of a seed in their order.
func (d *dealer) dealAll(chosen []kind) []fault {
	var all []fault
	for _, k := range chosen {
		if k.missing != nil && k.missing() != "" {
			continue
		}
		faults := k.deal(d)
		d.rng.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
		for _, f := range faults {
			f.kind = k.name
			all = append(all, f)
		}
	}
	d.rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// some returns how long a fault lasts: usually seconds, and sometimes longer than the timeouts and pauses of most parts.
func (d *dealer) some() time.Duration {
	if d.rng.IntN(10) == 0 {
		return longer
	}
	return time.Duration(500+d.rng.IntN(5000)) * time.Millisecond
}

// brief returns how long one of many faults of a kind lasts, so that a seed takes at most 20 minutes.
func (d *dealer) brief() time.Duration {
	return time.Duration(500+d.rng.IntN(2500)) * time.Millisecond
}

// fault returns a fault that lasts for some time.
func (d *dealer) fault(target string, begin, end func(ctx context.Context) error) fault {
	return fault{target: target, begin: begin, lasts: d.some(), end: end}
}

// doubles returns pairs of different kinds at once: one on a process or a link, and one on a server.
func (d *dealer) doubles() []fault {
	var all []fault
	for range 3 {
		first := pick(d.rng, slices.Concat(d.processKills(), d.processStops(), called("half-open ", d.halfOpens()), called("cut ", d.cuts())))
		lost := called("lost bytes of ", d.lostBytes())
		if strings.HasPrefix(first.target, "cut ") { // a cut link has no bytes to lose
			lost = slices.DeleteFunc(lost, first.sharesLink)
		}
		all = append(all, both(first, pick(d.rng, slices.Concat(d.serverKills(), d.serverStops(),
			called("memory alarm of ", d.memoryAlarms()), called("flush of ", d.flushes()), lost))))
	}
	return all
}

// sharesLink reports whether both faults disturb one link.
func (f fault) sharesLink(other fault) bool {
	return slices.ContainsFunc(f.links, func(l *testenv.Proxy) bool { return slices.Contains(other.links, l) })
}

// called puts the kind of fault into the targets.
func called(what string, faults []fault) []fault {
	for i := range faults {
		faults[i].target = what + faults[i].target
	}
	return faults
}

// both joins two faults: the second one begins and ends within the first.
func both(a, b fault) fault {
	end := func(f fault) func(context.Context) error {
		if f.end == nil {
			return func(context.Context) error { return nil }
		}
		return f.end
	}
	return fault{
		target: a.target + " + " + b.target, lasts: max(a.lasts, b.lasts), forgets: a.forgets + b.forgets, links: slices.Concat(a.links, b.links),
		begin: func(ctx context.Context) error {
			err := a.begin(ctx)
			if err != nil && !errors.Is(err, harness.ErrPromise) {
				return err
			}
			return errors.Join(err, b.begin(ctx)) // b must have begun before it ends
		},
		end: func(ctx context.Context) error { return errors.Join(end(b)(ctx), end(a)(ctx)) },
	}
}

func pick[T any](rng *rand.Rand, from []T) T { return from[rng.IntN(len(from))] }

// fakeTime returns the path of libfaketime, of Debian's package libfaketime; "" if there is none. The library sets the
// clock of a process that loads it. It only affects programs that get the time from the C library: Postgres and Redis, not
// Go programs.
func fakeTime() string {
	for _, pattern := range []string{"/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1"} {
		if found, _ := filepath.Glob(pattern); len(found) > 0 { // the only error is a malformed pattern
			return found[0]
		}
	}
	return ""
}

// openClock makes the pair's servers read their clock offset from a file.
func (p *pair) openClock() error {
	p.clock = filepath.Join(p.s.dir, string(p.spec.Kind)+".clock")
	// Redis' jemalloc asks for the time before libfaketime is ready, and hangs. The C library, loaded first, replaces its
	// malloc.
	p.spec.Env = append(p.spec.Env, "LD_PRELOAD="+fakeTime()+":libc.so.6", "FAKETIME_TIMESTAMP_FILE="+p.clock,
		"FAKETIME_CACHE_DURATION=1", "FAKETIME_DONT_FAKE_MONOTONIC=1")
	return p.setClock(0)
}

// setClock sets the clock of both servers off by wrong, within two seconds.
func (p *pair) setClock(wrong time.Duration) error {
	// A new file replaces the old one, so that a server reads either the old or the new value.
	fresh := p.clock + ".new"
	if err := os.WriteFile(fresh, fmt.Appendf(nil, "%+d\n", int64(wrong/time.Second)), 0o644); err != nil {
		return err
	}
	return os.Rename(fresh, p.clock)
}

// getTools installs missing servers and libfaketime, if it can. Without libfaketime there are no clock faults, and the
// report says so.
func getTools(ctx context.Context) error {
	if fakeTime() == "" && apt.CanInstall() {
		if err := apt.Install(ctx, "libfaketime"); err != nil {
			fmt.Fprintln(os.Stderr, "chaos: no libfaketime:", err)
		}
	}
	if missing := testenv.ServersMissing(); len(missing) > 0 && apt.CanInstall() {
		return apt.Install(ctx, missing...)
	}
	return nil
}

// endPatience is how long a process may take to end: the shop's own limit, doubled for a busy machine.
const endPatience = 90 * time.Second

// victims returns the processes for a fault: one of each role, and all of one role.
func (d *dealer) victims() map[string][]*process {
	all := map[string][]*process{}
	names := []string{"api", "relay", "consumer", "sweeper"}
	for _, role := range names {
		p := pick(d.rng, d.s.named(role))
		all[p.Name] = []*process{p}
	}
	role := pick(d.rng, names)
	all["every "+role] = d.s.named(role)
	return all
}

// toVictims returns a fault for each group of victims.
func (d *dealer) toVictims(what string, begin, end func(ctx context.Context, p []*process) error) []fault {
	var all []fault
	victims := d.victims()
	for _, name := range sortedKeys(victims) {
		all = append(all, d.fault(name+what,
			func(ctx context.Context) error { return begin(ctx, victims[name]) },
			func(ctx context.Context) error { return end(ctx, victims[name]) }))
	}
	return all
}

func (d *dealer) processKills() []fault {
	return d.toVictims(" killed",
		func(_ context.Context, victims []*process) error {
			errs := make([]error, len(victims))
			for i, p := range victims {
				errs[i] = p.kill()
			}
			return errors.Join(errs...)
		},
		func(_ context.Context, victims []*process) error { return d.s.replace(victims...) })
}

// kill ends the process. A process that has already ended by itself breaks a promise, which a restart would hide.
func (p *process) kill() error {
	if p.Ended() {
		return fmt.Errorf("%w: %s", harness.ErrPromise, harness.EndedByItself(p.Name))
	}
	p.Kill()
	return nil
}

// killedInHand returns faults that kill processes with messages in flight: the link to their server holds the answers.
func (d *dealer) killedInHand() []fault {
	inHand := func(role string, kind testenv.Kind) fault {
		p := pick(d.rng, d.s.named(role))
		f := d.fault(p.Name+" killed with messages in flight",
			func(context.Context) error {
				p.links[kind].Pause()
				return nil
			},
			func(context.Context) error {
				killed := p.kill()
				p.links[kind].Resume()
				return errors.Join(killed, d.s.replace(p))
			})
		f.lasts = time.Second
		return f
	}
	return []fault{inHand("relay", d.s.broker.Kind()), inHand("consumer", testenv.Postgres)}
}

func (d *dealer) processStops() []fault {
	all := func(sig syscall.Signal) func(context.Context, []*process) error {
		return func(_ context.Context, victims []*process) error {
			for _, p := range victims {
				if err := p.Signal(sig); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return d.toVictims(" stopped", all(syscall.SIGSTOP), all(syscall.SIGCONT))
}

func (d *dealer) processRestarts() []fault {
	faults := d.toVictims(" restarted",
		func(_ context.Context, victims []*process) error { return d.s.terminate(victims...) },
		func(_ context.Context, victims []*process) error { return d.s.replace(victims...) })
	for i := range faults {
		faults[i].lasts = 0
	}
	return faults
}

// terminate asks processes to end, and waits until they have ended.
func (s *system) terminate(processes ...*process) error {
	errs := make([]error, len(processes))
	var ending sync.WaitGroup
	for i, p := range processes {
		ending.Go(func() {
			if _, err := p.Terminate(endPatience); err != nil {
				p.Kill()
				errs[i] = fmt.Errorf("%w: %w", harness.ErrPromise, err)
			}
		})
	}
	ending.Wait()
	return errors.Join(errs...)
}

// deploys replaces one process after the other by the previous version, and then by this one again.
func (d *dealer) deploys() []fault {
	if d.previous == "" {
		return nil
	}
	roll := func(ctx context.Context, binary string) error {
		for _, i := range d.rng.Perm(len(d.s.processes)) {
			p := d.s.processes[i]
			if err := d.s.terminate(p); err != nil {
				return err
			}
			if err := p.Start(binary); err != nil {
				return err
			}
			if err := p.AwaitListening(harness.StartPatience); err != nil {
				return err
			}
		}
		return nil
	}
	f := d.fault("every process, one after the other",
		func(ctx context.Context) error { return roll(ctx, d.previous) },
		func(ctx context.Context) error { return roll(ctx, d.s.binary) })
	return []fault{f}
}

// linked are the roles with connections to a server. Every process connects to the broker at its start, to create the
// topology, but only the relay and the consumer depend on it.
type linked struct {
	server testenv.Kind
	roles  []string
}

func (s *system) linked() []linked {
	return []linked{
		{testenv.Postgres, []string{"api", "relay", "consumer", "sweeper"}},
		{testenv.Redis, []string{"api"}},
		{s.broker.Kind(), []string{"relay", "consumer"}},
	}
}

// longer exceeds the timeouts and pauses of most parts.
const longer = 23 * time.Second

// ofRole returns processes of a role: one, or all.
func (d *dealer) ofRole(role string) (name string, of []*process) {
	of = d.s.named(role)
	if d.rng.IntN(2) == 0 {
		return "every " + role, of
	}
	p := pick(d.rng, of)
	return p.Name, []*process{p}
}

// toLinks returns a network fault for each server and each role with connections to it, and for each server and all
// processes. end is nil for a fault that is over as soon as it starts.
func (d *dealer) toLinks(begin, end func(*testenv.Proxy)) []fault {
	var all []fault
	for _, l := range d.s.linked() {
		for _, role := range l.roles {
			name, of := d.ofRole(role)
			all = append(all, d.toLink(l.server, name, of, begin, end))
		}
		all = append(all, d.toLink(l.server, "all", d.s.processes, begin, end))
	}
	if end != nil {
		all[d.rng.IntN(len(all))].lasts = longer
	}
	return all
}

func (d *dealer) toLink(server testenv.Kind, name string, of []*process, begin, end func(*testenv.Proxy)) fault {
	f := fault{target: fmt.Sprintf("%s of %s", server, name)}
	for _, p := range of {
		f.links = append(f.links, p.links[server])
	}
	each := func(do func(*testenv.Proxy)) func(context.Context) error {
		return func(context.Context) error {
			for _, l := range f.links {
				do(l)
			}
			return nil
		}
	}
	f.begin = each(begin)
	if end != nil {
		f.lasts, f.end = d.brief(), each(end)
	}
	return f
}

func (d *dealer) cuts() []fault { return d.toLinks((*testenv.Proxy).Cut, (*testenv.Proxy).Heal) }

func (d *dealer) delays() []fault {
	late := time.Duration(20+d.rng.IntN(280)) * time.Millisecond
	return d.toLinks(func(p *testenv.Proxy) { p.Delay(late) }, func(p *testenv.Proxy) { p.Delay(0) })
}

// halfOpens are over as soon as they start: new connections work, the old ones are never reset.
func (d *dealer) halfOpens() []fault { return d.toLinks((*testenv.Proxy).SilenceConnections, nil) }

func (d *dealer) lostBytes() []fault {
	return d.toLinks((*testenv.Proxy).DropReplies, (*testenv.Proxy).Heal)
}
