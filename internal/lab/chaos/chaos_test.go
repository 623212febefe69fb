package main

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/chaos/audit"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	code := testenv.Run(m)
	shop.Remove()
	os.Exit(code)
}

// shortKinds are those of which the short seed has one fault each.
const shortKinds = "kill,restart,failover,cut,half-open,lost-bytes,memory-alarm,flush"

// One seed, of a few faults. The command runs all of them.
func TestOneSeed(t *testing.T) {
	t.Parallel()
	if missing := testenv.ServersMissing(); len(missing) > 0 {
		testenv.Missing(t, "not installed: "+strings.Join(missing, ", "))
	}
	chosen, err := kindsNamed(shortKinds)
	if err != nil {
		t.Fatal(err)
	}
	binary, err := shop.Binary()
	if err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	if text := os.Getenv("HOLDFAST_CHAOS_SEED"); text != "" {
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	report, h, err := play(t.Context(), seed, options{kinds: chosen, short: true, binary: binary, log: t.Output(), out: t.ArtifactDir()})
	if err != nil {
		t.Errorf("HOLDFAST_CHAOS_SEED=%d: %v", seed, err)
	}
	for _, o := range report.Outcomes {
		if len(o.Findings) > 0 {
			t.Errorf("HOLDFAST_CHAOS_SEED=%d: %v\n%s", seed, o, o.Explanation)
		}
		// A busy machine may take longer, but not three times: what waits for a timer that is too long takes longer.
		if slow := 3 * recoveryGoal.Seconds(); o.Recovery > slow {
			t.Errorf("HOLDFAST_CHAOS_SEED=%d: %v", seed, o)
		}
	}
	if !t.Failed() {
		sabotage(t, h)
	}
}

// sabotage wants lies about a history to be found that has none.
func sabotage(t *testing.T, h audit.History) {
	t.Helper()
	told := slices.IndexFunc(h.Answers, func(a audit.Answer) bool { return a.Op == audit.OpConfirm && a.Status == 200 })
	taken := slices.IndexFunc(h.Changes, func(c audit.Change) bool { return c.What == audit.OfTaken })
	if countLimited(h.Limit).Admitted == 0 {
		t.Error("the limiter admitted nothing of the user who asks for too much")
	}
	if told < 0 || taken < 0 {
		t.Fatal("nothing was confirmed: the seed shows nothing")
	}
	for want, lie := range map[string]func(h *audit.History){
		audit.SoldTwice: func(h *audit.History) {
			twin := h.Reservations[slices.IndexFunc(h.Reservations, func(r audit.Reservation) bool { return r.Status == audit.Confirmed })]
			twin.ID, twin.User = "twin", "twin"
			h.Reservations = append(h.Reservations, twin)
		},
		audit.NotDurable: func(h *audit.History) {
			h.Reservations = slices.DeleteFunc(h.Reservations, func(r audit.Reservation) bool { return r.ID == h.Answers[told].Reservation })
		},
		audit.TwoAnswers: func(h *audit.History) {
			another := h.Answers[told]
			another.Body = "another"
			h.Answers = append(h.Answers, another)
		},
		audit.Refused: func(h *audit.History) {
			h.Answers = append(h.Answers, audit.Answer{Op: audit.OpRead, Reservation: h.Answers[told].Reservation, Status: 500})
		},
		audit.Unexplained:  func(h *audit.History) { h.Events = append(h.Events, "of nobody") },
		audit.EffectTwice:  func(h *audit.History) { h.Changes = append(h.Changes, h.Changes[taken]) },
		audit.NotDelivered: func(h *audit.History) { h.Changes = slices.Delete(h.Changes, taken, taken+1) },
		audit.OverLimit: func(h *audit.History) {
			now := time.Now().Add(24 * time.Hour).Truncate(h.Limit.Window)
			for range h.Limit.Max + 1 {
				h.Limit.Asked = append(h.Limit.Asked, audit.Asked{Sent: now, Answered: now, Status: audit.StatusAdmitted})
			}
		},
	} {
		lied := h
		lied.Answers, lied.Changes, lied.Reservations = slices.Clone(h.Answers), slices.Clone(h.Changes), slices.Clone(h.Reservations)
		lied.Events = slices.Clone(h.Events)
		lied.Limit.Asked = slices.Clone(h.Limit.Asked)
		lie(&lied)
		if audit.Check(lied).Counts[want] == 0 {
			t.Errorf("nobody finds %s", want)
		}
	}
}

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

// Only the clock of Postgres says when a hold expires.
func TestWhoseClock(t *testing.T) {
	t.Parallel()
	for f, want := range map[*fault]bool{
		{kind: "clock", target: "postgres +7 s, and right again"}: true,
		{kind: "clock", target: "redis -7 s, and right again"}:    false,
		{kind: "kill", target: "postgres killed"}:                 false,
	} {
		if f.setsPostgresClock() != want {
			t.Errorf("%s %s: %v", f.kind, f.target, !want)
		}
	}
	if noClocks() != "" {
		return
	}
	found := map[bool]int{}
	for _, f := range dealt(7, kinds()) {
		if f.kind == "clock" {
			found[f.setsPostgresClock()]++
		}
	}
	if found[true] != 2 || found[false] != 2 {
		t.Errorf("%v", found)
	}
}

// A process that has ended by itself is found where none should have, and is not killed in silence.
func TestEndedByItself(t *testing.T) {
	dir := t.TempDir()
	scripts := map[string]string{"relay 1": "exit 0", "relay 2": "exec sleep 600"}
	for name, script := range scripts {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Parallel() // not before: a child of another test would have the scripts open for writing
	s := &system{}
	for name := range scripts {
		p := &process{Process: shop.New(name, nil)}
		if err := p.Start(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
		s.processes = append(s.processes, p)
	}
	err := poll(t.Context(), func() error {
		if len(s.ended()) == 0 {
			return errors.New("nobody has ended")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var o Outcome
	o.endedBetween("before the fault", s.ended())
	if len(o.Findings) != 1 || o.Findings[0].Detail != "relay 1 ended by itself before the fault" {
		t.Errorf("%+v", o.Findings)
	}
	for _, p := range s.processes {
		if err := p.kill(); errors.Is(err, errPromise) != (p.Name == "relay 1") {
			t.Errorf("killing %s: %v", p.Name, err)
		}
	}
}

// Of two faults at once both begin, also when the first finds a broken promise: both will be ended.
func TestBothBegin(t *testing.T) {
	t.Parallel()
	begun := 0
	begin := func(err error) func(context.Context) error {
		return func(context.Context) error {
			begun++
			return err
		}
	}
	if err := both(fault{begin: begin(errPromise)}, fault{begin: begin(nil)}).begin(t.Context()); !errors.Is(err, errPromise) || begun != 2 {
		t.Errorf("%v, %d have begun", err, begun)
	}
	broken := errors.New("the lab")
	if err := both(fault{begin: begin(broken)}, fault{begin: begin(nil)}).begin(t.Context()); !errors.Is(err, broken) || begun != 3 {
		t.Errorf("%v, %d have begun", err, begun)
	}
}

// What a machine cannot have is told, whether it is a kind or a part of one.
func TestMissing(t *testing.T) {
	t.Parallel()
	found := missing([]kind{
		{name: "whole"},
		{name: "there", missing: func() string { return "" }, lacks: func() (string, string) { return "", "" }},
		{name: "clock", missing: func() string { return "no library" }},
		{name: "disk", lacks: func() (string, string) { return "postgres", "no root" }},
	})
	if want := map[string]string{"clock": "no library", "disk of postgres": "no root"}; !maps.Equal(found, want) {
		t.Errorf("%v, want %v", found, want)
	}
	chosen, err := kindsNamed("disk-full")
	if err != nil {
		t.Fatal(err)
	}
	full := slices.ContainsFunc(dealt(7, chosen), func(f fault) bool { return f.target == "postgres" })
	if told := missing(chosen)["disk-full of postgres"] != ""; told == full {
		t.Errorf("the disk of postgres is full: %v, and told to be missing: %v", full, told)
	}
}

// The report says by which flags it was made.
func TestCommand(t *testing.T) {
	t.Parallel()
	if said, want := command([]string{"-only", "kill", "-seed=7"}), "go run ./internal/lab/chaos -only kill -seed=7"; said != want {
		t.Errorf("%q, want %q", said, want)
	}
}

func TestKindsNamed(t *testing.T) {
	t.Parallel()
	if all, err := kindsNamed(""); err != nil || len(all) != len(kinds()) {
		t.Errorf("%d kinds, %v", len(all), err)
	}
	some, err := kindsNamed("clock,kill")
	if err != nil || len(some) != 2 || some[0].name != "clock" {
		t.Errorf("%v %v", some, err)
	}
	if _, err := kindsNamed("kill,nothing"); err == nil {
		t.Error("an unknown kind is taken")
	}
}

// The report says what was found, how long the way back was, and what was lost.
func TestReport(t *testing.T) {
	t.Parallel()
	r := Report{Head: "Written by `some command`.", Previous: "abc", Missing: map[string]string{"clock": "no library"}, Goal: 10}
	r.add(SeedReport{Seed: 4, Outcomes: []Outcome{
		{Kind: "kill", Target: "relay 1 killed", Recovery: 2.5, Last: "outbox"},
		{Kind: "kill", Target: "api 2 killed", Recovery: 12.5, Last: "ready", Slow: true, Findings: []audit.Finding{{Kind: audit.SoldTwice, Detail: "seat 1"}}},
		{Kind: "failover-async", Target: "postgres, asynchronous", Lost: 9, Excused: map[string]int{audit.NotDurable: 3}},
	}})
	if !r.failed() {
		t.Error("it has not failed")
	}
	text := r.markdown()
	for _, want := range []string{
		"Left out: clock, for no library.", "started again | 2 | 12.5 | **12.5** | api 2 killed | ready | 1 |", "seed 4, kill, api 2 killed: a seat sold twice: seat 1",
		"seed 4: 9 changes of rows; a 2xx that is not durable: 3",
		"\nWritten by `some command`.\nDeployed from and back to abc.\n", "The goal is 10 s: 1 recovery above the goal.", "a recovery above the goal: 12.5 s, ready was last",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("it does not say %q:\n%s", want, text)
		}
	}
	if (Report{}).failed() {
		t.Error("an empty report has failed")
	}
}

// A whole seed without a finding must have denied something.
func TestWholeSeed(t *testing.T) {
	t.Parallel()
	denied := audit.Limit{Asked: []audit.Asked{{Status: audit.StatusDenied}}}
	broken := []Outcome{{Findings: []audit.Finding{{Kind: audit.SoldTwice}}}}
	for name, c := range map[string]struct {
		seed  SeedReport
		limit audit.Limit
		want  int
	}{
		"nothing denied":               {want: 1},
		"something denied":             {limit: denied},
		"cut":                          {seed: SeedReport{Cut: true}},
		"ended by what a fault brings": {seed: SeedReport{Outcomes: broken}},
	} {
		s := c.seed
		s.whole(c.limit)
		if len(s.Findings) != c.want {
			t.Errorf("%s: %+v", name, s.Findings)
		}
		r := Report{Seeds: []SeedReport{s}}
		if told := strings.Contains(r.markdown(), audit.NeverDenied); told != (c.want > 0) || c.want > 0 && !r.failed() {
			t.Errorf("%s: failed %v, and the report says\n%s", name, r.failed(), r.markdown())
		}
	}
}

// A recovery above the goal is counted and told, and the run does not fail.
func TestSlowRecovery(t *testing.T) {
	t.Parallel()
	var slow, prompt Outcome
	slow.recovered(recovery{after: map[string]time.Duration{"outbox": recoveryGoal + time.Millisecond}})
	prompt.recovered(recovery{after: map[string]time.Duration{"outbox": recoveryGoal}})
	r := Report{Goal: recoveryGoal.Seconds()}
	r.add(SeedReport{Outcomes: []Outcome{prompt, slow}})
	if r.failed() {
		t.Error("a slow recovery is a failure")
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var told struct {
		Slow  int `json:"recoveriesAboveTheGoal"`
		Seeds []struct {
			Outcomes []struct {
				Slow bool `json:"aboveTheGoal"`
			}
		}
	}
	if err := json.Unmarshal(text, &told); err != nil {
		t.Fatal(err)
	}
	if told.Slow != 1 || told.Seeds[0].Outcomes[0].Slow || !told.Seeds[0].Outcomes[1].Slow {
		t.Errorf("%s", text)
	}
	if want := "no promise was broken; 1 recovery above the goal of 10 s"; r.verdict() != want {
		t.Errorf("%q, want %q", r.verdict(), want)
	}
	r.Seeds[0].Outcomes[0].find(audit.Stuck, "a message")
	if want := "1 broken promise; 1 recovery above the goal of 10 s"; !r.failed() || r.verdict() != want {
		t.Errorf("%q, want %q", r.verdict(), want)
	}
}
