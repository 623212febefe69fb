package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// kind is a kind of fault.
type kind string

// The kinds of faults at a step of a process.
const (
	refused      kind = "refused"       // the server rejects the request; no effect
	lost         kind = "reply lost"    // it took effect; the process gets an error
	hung         kind = "hung"          // no answer for seconds; no effect
	late         kind = "late"          // it took effect; the answer takes seconds
	twice        kind = "twice"         // it takes effect twice
	nacked       kind = "nacked"        // of a publish: the broker rejects this message
	killedBefore kind = "killed before" // the process is gone; no effect
	killedAfter  kind = "killed after"  // the process is gone; it took effect
	frozenBefore kind = "frozen before" // the process stops for seconds, then sends the request
	frozenAfter  kind = "frozen after"  // it took effect, then the process stops for seconds
	ended        kind = "session ended" // of a consumer: it took effect, and the session ended
	vanished     kind = "vanished"      // of a consumer: it reports success without an effect
	unwanted     kind = "unwanted"      // of a consumer: a copy is rejected
	shortLease   kind = "short lease"   // the server's clock jumps: a lease expires at its start
)

// Faults that do not belong to a step.
const (
	conflicts kind = "conflicts"      // faults of transaction attempts: those below
	stopped   kind = "stopped"        // a process is asked to end, as in a deploy
	away      kind = "server away"    // a server is unreachable for seconds
	flushed   kind = "keys forgotten" // Redis loses all data: idempotency keys, and counters of limits
	fastClock kind = "fast clock"     // servers' clocks run up to three times as fast as a process's
	slowWire  kind = "slow wire"      // every request and answer takes up to 100 ms
)

// The kinds of faults of a transaction attempt.
const (
	notBegun        kind = "not begun"
	statementFailed kind = "statement failed"
	endFailed       kind = "end failed"        // by the last statement of the transaction
	commitRefused   kind = "COMMIT refused"    // nothing is stored
	commitCutOff    kind = "COMMIT cut off"    // nothing is stored, but the answer (08006) leaves it open
	commitLost      kind = "COMMIT lost"       // nothing is stored, and no answer arrives
	replyLost       kind = "COMMIT reply lost" // it is stored, and no answer arrives
)

var kinds = []kind{
	refused, lost, hung, late, twice, nacked, killedBefore, killedAfter, frozenBefore, frozenAfter,
	ended, vanished, unwanted, shortLease, conflicts, stopped, away, flushed, fastClock, slowWire,
}

// common are the faults of most steps.
var common = []kind{refused, lost, hung, late, killedBefore, killedAfter, frozenBefore, frozenAfter}

// possible are the faults of each step.
var possible = map[string][]kind{
	shoptest.StepClaim:       common,
	shoptest.StepRenew:       common,
	shoptest.StepSettle:      common,
	shoptest.StepKey:         common,
	shoptest.StepKeyExtend:   common,
	shoptest.StepKeyComplete: common,
	shoptest.StepKeyRelease:  common,
	shoptest.StepLimit:       common,
	shoptest.StepRefund:      common,
	shoptest.StepTransaction: {killedBefore, killedAfter, frozenBefore, frozenAfter},
	shoptest.StepBegin:       {refused, hung, killedBefore, frozenBefore},
	shoptest.StepEnd:         {refused, hung, killedBefore, frozenBefore},
	shoptest.StepPublish:     append(slices.Clone(common), twice, nacked),
	stepLease:                {shortLease},
	stepAttempt:              {notBegun, statementFailed, endFailed, commitRefused, commitCutOff, commitLost, replyLost},
	"open":                   {refused, lost, hung, ended, killedBefore, frozenBefore, frozenAfter},
	"start":                  {refused, lost, hung, ended, killedBefore, frozenBefore, frozenAfter},
	"receive":                {refused, lost, hung, ended, vanished, killedBefore, killedAfter, frozenBefore, frozenAfter},
	"ack":                    {refused, lost, hung, ended, vanished, killedBefore, killedAfter, frozenBefore, frozenAfter},
	"give back":              {refused, lost, hung, ended, killedBefore, frozenBefore, frozenAfter},
	"move":                   {refused, lost, hung, ended, unwanted, killedBefore, killedAfter, frozenBefore, frozenAfter},
	"stop":                   {refused, lost, hung, ended, killedBefore, frozenBefore, frozenAfter},
	"close":                  {refused, lost, hung, killedBefore, frozenBefore, frozenAfter},
}

// stepLease is the step at which a server starts a lease.
const stepLease = "lease"

// stepAttempt is a transaction attempt. Its faults are scripted before the schedule starts.
const stepAttempt = "attempt"

// Possible returns the faults of each step, with the names used in Result.Fired.
func Possible() map[string][]string {
	named := make(map[string][]string, len(possible))
	for step, kinds := range possible {
		for _, k := range kinds {
			named[step] = append(named[step], string(k))
		}
	}
	return named
}

// plan holds the decisions of a seed before a schedule starts.
type plan struct {
	rates   map[kind]float64 // per step, for the kinds that happen
	faulty  time.Duration    // when faults end
	clients int
	wishes  int // requests of each client, at least
	events  int
	seats   int // of each event
	hold    time.Duration
	script  []txretrytest.Fault
	away    []outage
	flushes []time.Duration
	limit   int // requests per user and minute
}

// outage is a time in which a server is unreachable.
type outage struct {
	server    string
	from, end time.Duration
}

const (
	processes = 2   // of each role
	requests  = 30  // of all clients, at least
	attempts  = 400 // transaction attempts in the script
)

// newPlan draws the plan. Each schedule has only some kinds of faults, so that frequent faults do not always
// hide rare ones.
func newPlan(d dice) plan {
	r := d.rand("plan")
	p := plan{
		rates:   map[kind]float64{},
		faulty:  time.Duration(15+r.IntN(45)) * time.Second,
		clients: 3 + r.IntN(6),
		events:  1 + r.IntN(2),
		seats:   3 + r.IntN(10),
		hold:    time.Duration(5+r.IntN(30)) * time.Second,
		limit:   limit(d.roll("limit", 0)),
	}
	p.wishes = (requests + p.clients - 1) / p.clients
	rate := []float64{0.003, 0.01, 0.03}[r.IntN(3)]
	for _, k := range kinds {
		if r.IntN(2) == 0 {
			p.rates[k] = rate
		}
	}
	if p.has(conflicts) {
		p.script = script(d, rate*4)
	}
	if p.has(away) {
		for range 1 + r.IntN(3) {
			from := time.Duration(r.Float64() * float64(p.faulty))
			server := []string{shoptest.Postgres, shoptest.Redis, shoptest.RabbitMQ}[r.IntN(3)]
			p.away = append(p.away, outage{server, from, min(p.faulty, from+time.Duration(1+r.IntN(15))*time.Second)})
		}
	}
	if p.has(flushed) {
		for range 1 + r.IntN(3) {
			p.flushes = append(p.flushes, time.Duration(r.Float64()*float64(p.faulty)))
		}
	}
	return p
}

// limit returns a limit that users reach in a quarter of the schedules. Waiting for it takes a schedule time.
func limit(r roll) int {
	if r.below(4) > 0 {
		return 20
	}
	return 5 + r.next().below(4)
}

// answered returns when clients must have their answers. A client with many requests waits for its limit.
func (p *plan) answered() time.Duration {
	return p.faulty + settleTime + time.Duration(2*p.wishes/p.limit)*limitWindow
}

func (p *plan) has(k kind) bool { return p.rates[k] > 0 }

// script draws the faults of transaction attempts.
func script(d dice, rate float64) []txretrytest.Fault {
	faults := make([]txretrytest.Fault, attempts)
	for i := range faults {
		if r := d.roll("transaction", uint64(i)); r.float() < rate {
			faults[i] = transactionFault(r.next())
		}
	}
	return faults
}

func transactionFault(r roll) txretrytest.Fault {
	state := []string{"40001", "40P01", "55P03", "57P01", "53300"}[r.next().below(5)]
	switch r.below(7) {
	case 0:
		return txretrytest.Fault{Point: txretrytest.AtBegin, SQLSTATE: state}
	case 1:
		return txretrytest.Fault{Point: txretrytest.AtStatement, Statement: 1 + r.next().next().below(6), SQLSTATE: state}
	case 2:
		return txretrytest.Fault{Point: txretrytest.AtEnd, SQLSTATE: state}
	case 3:
		return txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}
	case 4:
		return txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "08006"}
	case 5:
		return txretrytest.Fault{Point: txretrytest.ReplyLostApplied}
	default:
		return txretrytest.Fault{Point: txretrytest.ReplyLostNotApplied}
	}
}

// placeOf names the place of an attempt's fault in Result.Fired.
func placeOf(attempt int) string { return fmt.Sprintf("script, %s %d", stepAttempt, attempt) }

func kindOf(f txretrytest.Fault) kind {
	switch f.Point {
	case txretrytest.AtBegin:
		return notBegun
	case txretrytest.AtStatement:
		return statementFailed
	case txretrytest.AtEnd:
		return endFailed
	case txretrytest.ReplyLostApplied:
		return replyLost
	case txretrytest.ReplyLostNotApplied:
		return commitLost
	}
	if f.SQLSTATE == "08006" {
		return commitCutOff
	}
	return commitRefused
}

// dice decide the events of a schedule. Rolls under one label do not depend on rolls under other labels, so
// that leaving out one fault only changes its consequences.
type dice struct{ seed uint64 }

// roll returns the n-th number under a label.
func (d dice) roll(label string, n uint64) roll { return d.rollFor(label, "", n) }

// rollFor is roll for a label of two parts.
func (d dice) rollFor(label, part string, n uint64) roll {
	x := d.seed ^ hash(label) ^ mix(hash(part)) ^ n*0x9e3779b97f4a7c15
	return roll(mix(mix(x) + n))
}

// hash is FNV-1a.
func hash(text string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(text) {
		h = (h ^ uint64(text[i])) * 1099511628211
	}
	return h
}

// mix is the finalizer of splitmix64.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// rand returns an independent source for a label.
func (d dice) rand(label string) *rand.Rand { return rand.New(rand.NewPCG(d.seed, hash(label))) }

// roll is one throw. Several independent numbers can be derived from it.
type roll uint64

// next returns another throw.
func (r roll) next() roll { return roll(mix(uint64(r) + 0x9e3779b97f4a7c15)) }

// below returns a number from 0 to n-1.
func (r roll) below(n int) int { return int(uint64(r) % uint64(n)) }

// float returns a number from [0, 1).
func (r roll) float() float64 { return float64(uint64(r)>>11) / (1 << 53) }

// between returns a duration from [low, high).
func (r roll) between(low, high time.Duration) time.Duration {
	return low + time.Duration(r.float()*float64(high-low))
}
