package main

import (
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// A seed has the same faults in the same order each time.
func TestSeedRepeats(t *testing.T) {
	t.Parallel()
	deal := func(seed uint64) (names []string) {
		for _, f := range dealt(seed, kinds()) {
			names = append(names, f.kind+" "+f.target+" "+f.lasts.String())
		}
		return names
	}
	first := deal(7)
	if again := deal(7); !slices.Equal(first, again) {
		t.Errorf("%v\nand then\n%v", first, again)
	}
	if other := deal(8); slices.Equal(first, other) {
		t.Error("another seed has the same faults")
	}
	t.Logf("%d faults:\n%s", len(first), strings.Join(first, "\n"))
}

// dealt are the faults of a seed, of a system that does not run.
func dealt(seed uint64, chosen []kind) []fault {
	s := &system{db: &pair{spec: testenv.Spec{Kind: testenv.Postgres}}, redis: &pair{spec: testenv.Spec{Kind: testenv.Redis}}}
	for i, role := range roles {
		s.processes = append(s.processes, &process{Process: shop.New(role+" "+strconv.Itoa(1+i%2), nil), role: role})
	}
	d := &dealer{s: s, rng: rand.New(rand.NewPCG(seed, 1)), previous: "somewhere"}
	return d.dealAll(chosen)
}

// Every seed has each fault of the network for each server and role that are connected, and for all at once; each kind has
// one that outlasts timeouts, and all take no more of a seed than they may.
func TestSeedCoversEveryLink(t *testing.T) {
	t.Parallel()
	pairs := []string{
		"postgres of api", "postgres of relay", "postgres of consumer", "postgres of sweeper", "postgres of all",
		"redis of api", "redis of all", "rabbitmq of relay", "rabbitmq of consumer", "rabbitmq of all",
	}
	chosen, err := kindsNamed("cut,delay,half-open,lost-bytes")
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(20) {
		seen, longest, sum := map[string]int{}, map[string]time.Duration{}, time.Duration(0)
		for _, f := range dealt(seed, chosen) {
			pair := strings.TrimRight(strings.Replace(f.target, "of every ", "of ", 1), " 12")
			seen[f.kind+" "+pair]++
			longest[f.kind] = max(longest[f.kind], f.lasts)
			sum += f.lasts
		}
		for _, k := range chosen {
			for _, pair := range pairs {
				if n := seen[k.name+" "+pair]; n != 1 {
					t.Errorf("seed %d: %s of %s happens %d times", seed, k.name, pair, n)
				}
			}
			if k.name != "half-open" && longest[k.name] != longer {
				t.Errorf("seed %d: the longest %s lasts %v", seed, k.name, longest[k.name])
			}
		}
		if len(seen) != len(chosen)*len(pairs) || sum > 3*time.Minute {
			t.Errorf("seed %d: %d pairs, which last %v: %v", seed, len(seen), sum, seen)
		}
	}
}

// A seed has every victim that a kill, a stop and a restart can have.
func TestSeedCoversEveryVictim(t *testing.T) {
	t.Parallel()
	victims := []string{
		"api", "relay", "consumer", "sweeper", "postgres", "redis", "rabbitmq", "replica of redis",
		"synchronous standby of postgres", "asynchronous standby of postgres",
	}
	chosen, err := kindsNamed("kill,stop,restart")
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(20) {
		faults := dealt(seed, chosen)
		for _, k := range chosen {
			for _, victim := range victims {
				if !slices.ContainsFunc(faults, func(f fault) bool { return f.kind == k.name && strings.HasPrefix(f.target, victim+" ") }) {
					t.Errorf("seed %d: no %s of %s", seed, k.name, victim)
				}
			}
		}
	}
}

// Each fault by which Redis may lose its counts says so, and no other.
func TestWhatRedisForgets(t *testing.T) {
	t.Parallel()
	forgetful := []string{"kill redis killed", "restart redis restarted", "failover redis", "flush redis", "clock redis"}
	found := map[string]bool{}
	for _, f := range dealt(7, kinds()) {
		if f.kind == "double" {
			continue // it has what its two faults have
		}
		name := f.kind + " " + f.target
		i := slices.IndexFunc(forgetful, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
		if (i >= 0) != (f.forgets > 0) {
			t.Errorf("%s: forgets %d", name, f.forgets)
		}
		if i >= 0 {
			found[forgetful[i]] = true
		}
	}
	if noClocks() != "" {
		found["clock redis"] = true
	}
	if len(found) != len(forgetful) {
		t.Errorf("only %v", found)
	}
	if f := both(fault{forgets: 1}, fault{forgets: 2}); f.forgets != 3 {
		t.Errorf("two at once forget %d", f.forgets)
	}
}
