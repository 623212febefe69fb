package sim

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Enumerated schedules have exactly the faults that a caller of Enumerate chooses.
//
// One buyer holds a seat and confirms the hold, which are two messages of one key. One process serves the buyer; two
// relays and two consumers do the rest. A point is a call of one of these processes to a server, from their start until
// nothing is under way. The calls inside a transaction and the COMMIT of each attempt are points of their own.
//
// All schedules with at most two faults are the schedule without faults; each fault at each of its points; and, for each
// of these, each fault at each later point of that schedule. The last ones depend on the first fault, so the schedule with
// the first fault is run to list them.
//
// The seed gives each choice of faults one order of events. The models (internal/lab/models) cover the other orders.
//
// Only schedules that repeat can be enumerated. A frozen process continues with all its goroutines at the same moment, in
// any order, so freezing is left to the drawn schedules. A lease that expires at its start has the same effect on others.
// A call that hangs or is late has one duration. Servers that are away, lost keys and clocks are left to the drawn
// schedules, too.

// Point is a place in a schedule where a fault can happen: the N-th time, from 0, that a process takes a step.
type Point struct {
	Process, Step string
	N             uint64
	At            time.Duration // by the schedule's clock
}

// Faults returns the faults that can happen at the point.
func (p Point) Faults() (faults []Fault) {
	kinds := slices.Clone(possible[p.Step])
	switch p.Step {
	case stepAttempt:
		kinds = []kind{commitRefused, commitLost, replyLost}
	case stepLease: // its call follows
	default:
		kinds = append(kinds, stopped)
	}
	for _, k := range kinds {
		if k != frozenBefore && k != frozenAfter {
			faults = append(faults, Fault{p, string(k)})
		}
	}
	return faults
}

func (p Point) where() string { return fmt.Sprintf("%s, %s %d", p.Process, p.Step, p.N) }

// Fault is a kind of fault at a point.
type Fault struct {
	Point
	Kind string
}

// String returns the name of the fault in Result.Fired.
func (f Fault) String() string { return name(kind(f.Kind), f.where()) }

// Enumerated is the result of an enumerated schedule.
type Enumerated struct {
	Findings []string // broken promises; empty if all is well
	Points   []Point  // in their order
	Fired    int      // the number of faults that have happened
}

// enumeratedSeed chooses the ids, the jitter and the durations of calls.
const enumeratedSeed = 1

// Enumerate runs the schedule with the given faults and no others. The points up to the last fault are the same in every
// run, if all other goroutines of the program are idle.
func Enumerate(t *testing.T, faults []Fault) (result Enumerated) {
	defer func() {
		if p := recover(); p != nil { // a deadlock: something waits forever
			result.Findings = append(result.Findings, fmt.Sprint(p), remaining())
		}
	}()
	synctest.Test(t, func(*testing.T) {
		w := newWorld(dice{enumeratedSeed}, plan{clients: 1, events: 1, seats: 3, wishes: 2, limit: 20, hold: 10 * time.Minute})
		w.choice = &choice{faults: faults}
		if err := w.openShop(w.choice.script()); err != nil {
			result.Findings = []string{err.Error()}
			return
		}
		w.enumerate()
		w.mu.Lock()
		defer w.mu.Unlock()
		result = Enumerated{w.findings, w.choice.points, len(w.fired)}
	})
	return result
}

// enumerate plays an enumerated schedule.
func (w *world) enumerate() {
	defer time.AfterFunc(time.Hour, func() { panic("sim: the schedule does not end") }).Stop()
	var supervisors sync.WaitGroup
	supervisors.Go(func() { w.supervise("api", 0, w.beginAPI(0)) })
	w.open()
	w.choice.record(true)
	for i := range processes {
		w.later(&supervisors, 2*i+1, func() { w.supervise("relay", i, w.beginRelay) })
		w.later(&supervisors, 2*i+2, func() { w.supervise("consumer", i, w.beginConsumer) })
	}
	buyer := w.newClient(0)
	buyer.hold(buyer.holdRequest(w.history.events()[0]))
	if len(buyer.mine) > 0 {
		buyer.settle("confirm")
	}
	state := w.settle(50*time.Millisecond, func(s shoptest.State) bool { return settled(s) && w.history.isLearned() })
	w.choice.record(false)
	if bought := w.history.outcomes(); bought["held"] != 1 || bought["confirmed"] != 1 {
		w.found("the buyer has no seat, or more than one: %v", bought)
	}
	w.finish(state, &supervisors)
}

// later starts the n-th process. They start one after the other, so that their order is always the same.
func (w *world) later(supervisors *sync.WaitGroup, n int, supervise func()) {
	supervisors.Go(func() {
		time.Sleep(time.Duration(n) * 130 * time.Microsecond)
		supervise()
	})
}

// chosen returns the fault of a process at the n-th time of a step. The last call of a transaction is followed by the
// point of its COMMIT, whose fault is in the script.
func (w *world) chosen(process, step string, n uint64) (kind, roll) {
	p := Point{process, step, n, w.now()}
	k := w.choice.at(p)
	if k == "" && step == shoptest.StepEnd {
		w.choice.at(Point{"script", stepAttempt, w.choice.attempt(), w.now()})
	}
	if k == "" || !w.fires(k, p.where()) {
		return "", 0
	}
	return k, w.dice.rollFor(process, step, n+1<<33).next()
}

// choice has the faults of an enumerated schedule, and records its points.
type choice struct {
	faults []Fault

	mu       sync.Mutex
	records  bool
	points   []Point
	attempts uint64 // of all transactions, also of the observer
}

// record switches faults and the recording of points on or off.
func (c *choice) record(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.records = on
}

// begin counts an attempt of a transaction. The fakes run one transaction at a time, so it is the current one until the
// next call.
func (c *choice) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.attempts++
}

// attempt returns the index of the current attempt in the script.
func (c *choice) attempt() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.attempts - 1
}

// at records a point and returns its fault; "" for none.
func (c *choice) at(p Point) kind {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.records {
		return ""
	}
	c.points = append(c.points, p)
	for _, f := range c.faults {
		if f.where() == p.where() {
			return kind(f.Kind)
		}
	}
	return ""
}

// script returns the faults of transaction attempts.
func (c *choice) script() []txretrytest.Fault {
	script := make([]txretrytest.Fault, attempts)
	for _, f := range c.faults {
		if f.Step != stepAttempt {
			continue
		}
		switch kind(f.Kind) {
		case commitRefused:
			script[f.N] = txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}
		case commitLost:
			script[f.N] = txretrytest.Fault{Point: txretrytest.ReplyLostNotApplied}
		case replyLost:
			script[f.N] = txretrytest.Fault{Point: txretrytest.ReplyLostApplied}
		}
	}
	return script
}
