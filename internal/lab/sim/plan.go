package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// kind is what goes wrong at a step.
type kind string

// The kinds of faults at a step of a process.
const (
	refused      kind = "refused"       // the server says no; nothing has happened
	lost         kind = "reply lost"    // it has happened; the process is told of a failure
	hung         kind = "hung"          // no answer for seconds; nothing has happened
	late         kind = "late"          // it has happened; the answer takes seconds
	twice        kind = "twice"         // it happens two times
	nacked       kind = "nacked"        // of a publish: the broker does not take this one message
	killedBefore kind = "killed before" // the process is gone, and nothing has happened
	killedAfter  kind = "killed after"  // the process is gone, and it has happened
	frozenBefore kind = "frozen before" // the process stands still for seconds, then asks
	frozenAfter  kind = "frozen after"  // it has happened, then the process stands still
	ended        kind = "session ended" // of a consumer: it has happened, and the session is over
	vanished     kind = "vanished"      // of a consumer: it seems to have happened, and has not
	unwanted     kind = "unwanted"      // of a consumer: a copy is refused
	shortLease   kind = "short lease"   // the server's clock jumps: a lease has run out as soon as it begins
)

// The faults that are no step's.
const (
	conflicts kind = "conflicts"      // of attempts of transactions: those below
	stopped   kind = "stopped"        // a process is told to end, as a deploy does
	away      kind = "server away"    // a server is not there for seconds
	flushed   kind = "keys forgotten" // Redis forgets all that it holds: idempotency keys, and counters of limits
	fastClock kind = "fast clock"     // servers' clocks run up to three times as fast as a process's
	slowWire  kind = "slow wire"      // every way takes up to 100 ms
)

// The kinds of faults of an attempt of a transaction.
const (
	notBegun        kind = "not begun"
	statementFailed kind = "statement failed"
	endFailed       kind = "end failed"        // by the last statement of the transaction
	commitRefused   kind = "COMMIT refused"    // nothing is stored
	commitCutOff    kind = "COMMIT cut off"    // nothing is stored, but the answer (08006) does not tell
	commitLost      kind = "COMMIT lost"       // nothing is stored, and no answer arrives
	replyLost       kind = "COMMIT reply lost" // it is stored, and no answer arrives
)

var kinds = []kind{
	refused, lost, hung, late, twice, nacked, killedBefore, killedAfter, frozenBefore, frozenAfter,
	ended, vanished, unwanted, shortLease, conflicts, stopped, away, flushed, fastClock, slowWire,
}

// common are the faults that most steps of a process to a server may have.
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

// stepLease is the step at which a server takes the time of a lease.
const stepLease = "lease"

// stepAttempt is an attempt of a transaction, whose faults are scripted before the schedule begins.
const stepAttempt = "attempt"

// Possible returns the faults of each step, as Result.Fired names both.
func Possible() map[string][]string {
	named := make(map[string][]string, len(possible))
	for step, kinds := range possible {
		for _, k := range kinds {
			named[step] = append(named[step], string(k))
		}
	}
	return named
}

// plan is what a seed decides before a schedule begins.
type plan struct {
	rates   map[kind]float64 // of the kinds that happen, per step
	faulty  time.Duration    // when faults end
	clients int
	wishes  int // requests of each client, at least
	events  int
	seats   int // of each event
	hold    time.Duration
	script  []txretrytest.Fault
	away    []outage
	flushes []time.Duration
	limit   int // of each user's requests in a minute
}

// outage is a time in which a server is not there.
type outage struct {
	server    string
	from, end time.Duration
}

const (
	processes = 2   // of each role
	requests  = 30  // of all clients, at least
	attempts  = 400 // of transactions that the script covers
)

// newPlan draws the plan. Each schedule has some kinds of faults and not others, so that a rare
// fault is not always hidden behind frequent ones.
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

// limit is one that users meet in a quarter of the schedules. To wait for it takes a schedule time.
func limit(r roll) int {
	if r.below(4) > 0 {
		return 20
	}
	return 5 + r.next().below(4)
}

// answered is when clients must have had their answers. One with many wishes waits for its limit.
func (p *plan) answered() time.Duration {
	return p.faulty + settleTime + time.Duration(2*p.wishes/p.limit)*limitWindow
}

func (p *plan) has(k kind) bool { return p.rates[k] > 0 }

// script draws what befalls the attempts of transactions.
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

// placeOf is where the fault of an attempt is in Result.Fired.
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

// dice decide what happens in a schedule. What is rolled under a label does not depend on what is rolled under
// others, so that a fault that is left out changes nothing but what follows from it.
type dice struct{ seed uint64 }

// roll returns a number for the n-th time under a label.
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

// rand returns a source of its own for a label.
func (d dice) rand(label string) *rand.Rand { return rand.New(rand.NewPCG(d.seed, hash(label))) }

// roll is one throw, from which several independent numbers can be had.
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
