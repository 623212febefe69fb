package main

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
)

// Report is the result of a run.
type Report struct {
	// Head describes the command, the time, the commit and the machine.
	Head string
	// Previous is the commit that rolling deploys start from.
	Previous string
	// Missing has the faults that the machine cannot have, with reasons.
	Missing map[string]string
	Seeds   []SeedReport
}

// SeedReport is the result of one seed. Times are in seconds.
type SeedReport struct {
	Seed uint64
	Took float64
	// Cut means that time was up before all faults had happened.
	Cut      bool
	Outcomes []harness.Outcome
	// Answers counts the answers to clients by status; 0 is no answer. Keys is how many keys they used.
	Answers map[int]int
	Keys    int
	// Messages counts committed messages, and Repeats the messages that the broker received again.
	Messages int
	Repeats  int
	// Limit has the answers to the user who exceeds the limit.
	Limit Limited
	// Findings are the findings that belong to no fault.
	Findings []audit.Finding
	// Error is a failure of the lab itself.
	Error string
}

// Limited counts the answers to the user who sends more requests than the limit allows per window.
type Limited struct {
	Max       int
	Admitted  int
	Denied    int
	Undecided int
	NoAnswer  int
	// Fullest is the most that one window has certainly admitted, among windows in which Redis lost
	// nothing.
	Fullest int
	// Forgotten is how many times Redis may have lost its counts.
	Forgotten int
}

func countLimited(l audit.Limit) Limited {
	sum := Limited{Max: l.Max}
	for _, a := range l.Asked {
		switch a.Status {
		case audit.StatusAdmitted:
			sum.Admitted++
		case audit.StatusDenied:
			sum.Denied++
		case audit.StatusUndecided:
			sum.Undecided++
		case 0:
			sum.NoAnswer++
		}
	}
	for window, n := range l.Admitted() {
		if l.Most(window) == l.Max {
			sum.Fullest = max(sum.Fullest, n)
		}
	}
	for _, f := range l.Forgotten {
		sum.Forgotten += f.Times
	}
	return sum
}

// count summarizes a seed.
func (r *SeedReport) count(j harness.Judged, took time.Duration) {
	h := j.History
	r.Took, r.Answers = harness.Seconds(took), map[int]int{}
	keys := map[string]bool{}
	for _, a := range h.Answers {
		r.Answers[a.Status]++
		keys[a.Key] = true
	}
	delete(keys, "")
	r.Keys, r.Messages, r.Repeats = len(keys), j.Broker.Committed, j.Broker.Duplicates
	r.Limit = countLimited(h.Limit)
}

// findings counts the findings of a seed.
func (r SeedReport) findings() int {
	n := len(r.Findings)
	for _, o := range r.Outcomes {
		n += len(o.Findings)
	}
	return n
}

// whole adds findings that only a complete seed of every kind can show.
func (r *SeedReport) whole(l audit.Limit) {
	if r.Cut || r.findings() > 0 {
		return
	}
	r.Findings = l.Empty()
}

// slow counts the recoveries of a seed that are above the goal.
func (r SeedReport) slow() int {
	n := 0
	for _, o := range r.Outcomes {
		if o.Slow {
			n++
		}
	}
	return n
}

// slow counts the recoveries that are above the goal.
func (r Report) slow() (n int) {
	for _, s := range r.Seeds {
		n += s.slow()
	}
	return n
}

// aboveTheGoal returns slow as text.
func (r Report) aboveTheGoal() string {
	return counted(r.slow(), "recovery", "recoveries") + " above the goal"
}

// counted formats a number of things.
func counted(n int, one, many string) string {
	if n == 1 {
		many = one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// verdict is the last line of a run. Slow recoveries do not make the run fail.
func (r Report) verdict() string {
	findings, broken := 0, 0
	for _, s := range r.Seeds {
		findings += s.findings()
		if s.Error != "" {
			broken++
		}
	}
	line := "no promise was broken"
	if findings > 0 {
		line = counted(findings, "broken promise", "broken promises")
	}
	if broken > 0 {
		line += ", the lab itself failed on " + counted(broken, "seed", "seeds")
	}
	return fmt.Sprintf("%s; %s of %v", line, r.aboveTheGoal(), harness.Goal)
}

// failed reports whether a promise was broken, or the lab itself failed. A slow recovery is not a
// failure.
func (r Report) failed() bool {
	return slices.ContainsFunc(r.Seeds, func(s SeedReport) bool { return s.Error != "" || s.findings() > 0 })
}

// write writes report.md.
func (r Report) write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "report.md"), []byte(r.markdown()), 0o644)
}

const preface = `
Two api, two relays, two consumers and two sweepers of
examples/reservation ran as processes, on a Postgres and a Redis with a standby each and on a RabbitMQ, or a NATS where the
command above says so, while clients held, confirmed,
cancelled and read, some of them with the same key twice. After each fault everything that the clients were told was compared
with every change that the database had noted: no seat sold twice, every 2xx durable, one answer and one effect for each key, every committed
message at the broker in the order of its reservation, taken once, and in the read model; every due hold expired, no dead letter,
no answer but those that a request may get, no user beyond the limit, no process that ended by itself, everybody ready.

A seed has each fault of the network for each server and each role that stays connected to it, and for all processes; and each
process, server and standby killed, stopped and restarted. While a synchronous standby is away every commit waits, and clients get no answer: no
answer may be wrong, and all work must continue when the standby is back.
`

const limitsOfIt = `
## What this does not show

- Clocks: libfaketime reaches Postgres and Redis. Processes of Go do not ask the C library for the time: theirs are the machine's.
- Whether a hold has expired is what the clock of Postgres says: once that has gone back, a hold that was read as expired may still be confirmed.
- Everything runs on one machine: a failover moves an address, as a virtual IP does, once the old primary is dead. There is no split brain.
- The broker has one node. RabbitMQ's full disk and memory are alarms that are set; NATS has neither fault. Redis keeps nothing on a disk, so none of it can be full.
- A disk of Postgres is memory: a power cut that loses what was not yet synced is not among the faults.
`

func (r Report) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# What the shop went through\n\n%s\n", r.Head)
	if r.Previous != "" {
		fmt.Fprintf(&b, "Deployed from and back to %s.\n", r.Previous)
	}
	b.WriteString(preface)
	if len(r.Missing) > 0 {
		b.WriteString("\n")
	}
	for _, name := range sortedKeys(r.Missing) {
		fmt.Fprintf(&b, "Left out: %s, for %s.\n", name, r.Missing[name])
	}
	b.WriteString("\n## Seeds\n\n| seed | faults | minutes | requests | keys | 2xx | no answer | messages | repeats at the broker | findings | above the goal |\n|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, s := range r.Seeds {
		total, good := 0, 0
		for status, n := range s.Answers {
			total += n
			if status == http.StatusOK || status == http.StatusCreated {
				good += n
			}
		}
		fmt.Fprintf(&b, "| %d | %d | %.0f | %d | %d | %d | %d | %d | %d | %d | %d |\n",
			s.Seed, len(s.Outcomes), s.Took/60, total, s.Keys, good, s.Answers[0], s.Messages, s.Repeats, s.findings(), s.slow())
	}
	for _, s := range r.Seeds {
		if s.Cut {
			fmt.Fprintf(&b, "\nSeed %d has more faults: time was up.\n", s.Seed)
		}
	}
	r.recoveries(&b)
	r.found(&b)
	r.limits(&b)
	r.lost(&b)
	b.WriteString(limitsOfIt)
	return b.String()
}

// recoveries renders the table of recovery times.
func (r Report) recoveries(b *strings.Builder) {
	all := map[string][]harness.Outcome{}
	for _, s := range r.Seeds {
		for _, o := range s.Outcomes {
			all[o.Kind] = append(all[o.Kind], o)
		}
	}
	fmt.Fprintf(b, "\n## Recovery\n\nSeconds from the end of a fault until every process was ready, every api answered for every event, and all that had"+
		" happened\nby then was published, taken, and expired where it was due. The goal is %v: %s.\n\n", harness.Goal, r.aboveTheGoal())
	b.WriteString("| fault | how often | median | longest | of | last to recover | above the goal | slowest answer | findings |\n|---|---|---|---|---|---|---|---|---|\n")
	for _, k := range kinds() {
		outcomes := all[k.name]
		if len(outcomes) == 0 {
			continue
		}
		slices.SortFunc(outcomes, func(x, y harness.Outcome) int { return cmp.Compare(x.Recovery, y.Recovery) })
		worst := outcomes[len(outcomes)-1]
		sum := SeedReport{Outcomes: outcomes}
		slowest := slices.MaxFunc(outcomes, func(x, y harness.Outcome) int { return cmp.Compare(x.Slowest, y.Slowest) }).Slowest
		fmt.Fprintf(b, "| %s: %s | %d | %.1f | %s | %s | %s | %d | %.1f | %d |\n", k.name, k.what, len(outcomes), outcomes[len(outcomes)/2].Recovery,
			seconds(worst), worst.Target, worst.Last, sum.slow(), slowest, sum.findings())
	}
}

// seconds formats the recovery, and marks it if it is above the goal.
func seconds(o harness.Outcome) string {
	if o.Slow {
		return fmt.Sprintf("**%.1f**", o.Recovery)
	}
	return fmt.Sprintf("%.1f", o.Recovery)
}

// found lists all findings.
func (r Report) found(b *strings.Builder) {
	b.WriteString("\n## Findings\n\n")
	none := true
	for _, s := range r.Seeds {
		if s.Error != "" {
			fmt.Fprintf(b, "- seed %d: the lab itself: %s\n", s.Seed, s.Error)
			none = false
		}
		for _, f := range s.Findings {
			fmt.Fprintf(b, "- seed %d: %s: %s\n", s.Seed, f.Kind, f.Detail)
			none = false
		}
		for _, o := range s.Outcomes {
			if o.Slow {
				fmt.Fprintf(b, "- seed %d, %s, %s: a recovery above the goal: %.1f s, %s was last\n", s.Seed, o.Kind, o.Target, o.Recovery, o.Last)
				none = false
			}
			for _, f := range o.Findings {
				fmt.Fprintf(b, "- seed %d, %s, %s: %s: %s\n", s.Seed, o.Kind, o.Target, f.Kind, f.Detail)
				none = false
			}
		}
	}
	if none {
		b.WriteString("None.\n")
	}
}

// limits renders the table of the user who exceeds the limit.
func (r Report) limits(b *strings.Builder) {
	fmt.Fprintf(b, "\n## Rate limits\n\nOne user asks through both apis for more than the %d requests that the shop admits per user and minute. No minute of Redis' clock admits\n"+
		"more, but for once more for each time that Redis may have lost its counts: it is flushed, loses its memory, fails over or has its clock set. What\n"+
		"Redis cannot be asked about is refused with 503. The fullest minute is of those in which nothing was lost.\n\n", userLimit)
	b.WriteString("| seed | admitted | denied | undecided | no answer | fullest minute | losses |\n|---|---|---|---|---|---|---|\n")
	for _, s := range r.Seeds {
		l := s.Limit
		fmt.Fprintf(b, "| %d | %d | %d | %d | %d | %d | %d |\n", s.Seed, l.Admitted, l.Denied, l.Undecided, l.NoAnswer, l.Fullest, l.Forgotten)
	}
}

// lost lists the losses of asynchronous failovers, if there were any.
func (r Report) lost(b *strings.Builder) {
	var lines strings.Builder
	for _, s := range r.Seeds {
		for _, o := range s.Outcomes {
			if o.Lost == 0 {
				continue
			}
			fmt.Fprintf(&lines, "- seed %d: %d changes of rows", s.Seed, o.Lost)
			for _, kind := range sortedKeys(o.Excused) {
				fmt.Fprintf(&lines, "; %s: %d", kind, o.Excused[kind])
			}
			lines.WriteString("\n")
		}
	}
	if lines.Len() == 0 {
		return
	}
	b.WriteString("\n## Lost by asynchronous failover\n\nA standby that is behind when its primary dies lacks the newest commits. They were read from the old primary's disk afterwards.\n" +
		"Answers to clients about these commits do not hold; everything else does.\n\n" + lines.String())
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
