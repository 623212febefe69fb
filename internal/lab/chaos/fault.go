package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// fault is one thing that goes wrong and is put right again.
type fault struct {
	kind, target string
	begin        func(ctx context.Context) error
	// lasts is the time between begin and end.
	lasts time.Duration
	// end is nil where the fault is over as soon as it has begun.
	end func(ctx context.Context) error
	// forgets is how many times Redis may lose the counts of rate limits by it, in all or in part.
	forgets int
	// after restores what is no part of the recovery, such as a new standby. It runs beside the recovery.
	after func(ctx context.Context) error
}

// setsPostgresClock reports whether the fault sets the clock that says when holds expire. That of Redis does not.
func (f fault) setsPostgresClock() bool {
	return f.kind == "clock" && strings.HasPrefix(f.target, string(testenv.Postgres))
}

// kind is a kind of fault.
type kind struct {
	name, what string
	// deal returns the faults of a seed.
	deal func(d *dealer) []fault
	// missing says why this machine cannot have it, "" if it can.
	missing func() string
	// lacks says which part of it this machine cannot have, and why.
	lacks func() (what, why string)
}

// missing says what of some kinds this machine cannot have, and why.
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
	// previous is the binary of the version to deploy from, "" for none.
	previous string
}

// kinds are all there are.
func kinds() []kind {
	return []kind{
		{name: "kill", what: "kill -9, and started again", deal: (*dealer).kills},
		{name: "stop", what: "SIGSTOP, and SIGCONT", deal: (*dealer).stops},
		{name: "restart", what: "asked to end, and started again", deal: (*dealer).restarts},
		{name: "failover", what: "the primary killed -9 and its standby promoted; Postgres synchronous, Redis as it always is", deal: (*dealer).failovers},
		{name: "failover-async", what: "Postgres again, its standby behind: what it lacks is lost, and counted", deal: (*dealer).asyncFailovers},
		{name: "cut", what: "connections reset, new ones refused", deal: (*dealer).cuts},
		{name: "delay", what: "every read late", deal: (*dealer).delays},
		{name: "half-open", what: "connections open, and silent for ever", deal: (*dealer).halfOpens},
		{name: "lost-bytes", what: "requests arrive, answers are lost", deal: (*dealer).lostBytes},
		{name: "disk-full", what: "no room left: on Postgres' own disk, and RabbitMQ's alarm", deal: (*dealer).fullDisks, lacks: noDisk},
		{name: "memory-alarm", what: "RabbitMQ's alarm: publishers are blocked", deal: (*dealer).memoryAlarms},
		{name: "flush", what: "FLUSHALL of Redis", deal: (*dealer).flushes},
		{name: "read-only", what: "Redis a replica, as when an address moves too early; Postgres in read-only transactions", deal: (*dealer).readOnly},
		{name: "locks", what: "a table locked by another session", deal: (*dealer).locks},
		{name: "clock", what: "the clocks of Postgres or Redis jump", deal: (*dealer).clocks, missing: noClocks},
		{name: "deploy", what: "a rolling deploy to the version before and back", deal: (*dealer).deploys},
		{name: "double", what: "two faults of two kinds at once", deal: (*dealer).doubles},
	}
}

// kindsNamed returns the kinds of a list of names, all for "".
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

// some is how long a fault lasts: mostly seconds, and now and then longer than the timeouts and pauses of most parts.
func (d *dealer) some() time.Duration {
	if d.rng.IntN(10) == 0 {
		return longer
	}
	return time.Duration(500+d.rng.IntN(5000)) * time.Millisecond
}

// brief is how long one of many faults of a kind lasts, so that a seed takes no longer than 20 minutes.
func (d *dealer) brief() time.Duration {
	return time.Duration(500+d.rng.IntN(2500)) * time.Millisecond
}

// fault returns one that lasts for some time.
func (d *dealer) fault(target string, begin, end func(ctx context.Context) error) fault {
	return fault{target: target, begin: begin, lasts: d.some(), end: end}
}

// doubles has two faults of different kinds happen at once: a process or a link, and something of a server.
func (d *dealer) doubles() []fault {
	var all []fault
	for range 3 {
		first := pick(d.rng, slices.Concat(d.processKills(), d.processStops(), called("half-open ", d.halfOpens()), called("cut ", d.cuts())))
		second := pick(d.rng, slices.Concat(d.serverKills(), d.serverStops(),
			called("memory alarm of ", d.memoryAlarms()), called("flush of ", d.flushes()), called("lost bytes of ", d.lostBytes())))
		all = append(all, both(first, second))
	}
	return all
}

// called says in the targets what happens to them.
func called(what string, faults []fault) []fault {
	for i := range faults {
		faults[i].target = what + faults[i].target
	}
	return faults
}

// both joins two faults: the second begins and ends inside of the first.
func both(a, b fault) fault {
	end := func(f fault) func(context.Context) error {
		if f.end == nil {
			return func(context.Context) error { return nil }
		}
		return f.end
	}
	return fault{
		target: a.target + " + " + b.target, lasts: max(a.lasts, b.lasts), forgets: a.forgets + b.forgets,
		begin: func(ctx context.Context) error {
			err := a.begin(ctx)
			if err != nil && !errors.Is(err, harness.ErrPromise) {
				return err
			}
			return errors.Join(err, b.begin(ctx)) // what ends must have begun
		},
		end: func(ctx context.Context) error { return errors.Join(end(b)(ctx), end(a)(ctx)) },
	}
}

func pick[T any](rng *rand.Rand, from []T) T { return from[rng.IntN(len(from))] }
