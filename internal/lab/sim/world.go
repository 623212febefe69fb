package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// world is one schedule: the shop, its processes, its clients and their answers.
type world struct {
	dice  dice
	plan  plan
	keep  func(fault string) bool // nil: all happen
	began time.Time

	ctx     context.Context // of all processes
	end     context.CancelFunc
	ending  context.Context // ends when all processes are asked to end
	tellAll context.CancelFunc
	shop    *shoptest.Shop
	history history
	remains sync.WaitGroup // of killed processes

	servants servants
	choice   *choice // of an enumerated schedule; nil: the dice decide about faults

	mu       sync.Mutex
	apis     [processes]*process // nil while one is down
	fired    map[string]bool
	findings []string
}

// now returns the time since the schedule started.
func (w *world) now() time.Duration { return time.Since(w.began) }

// isFaulty reports whether faults happen.
func (w *world) isFaulty() bool { return w.now() < w.plan.faulty }

// isAway reports whether a server is unreachable.
func (w *world) isAway(server string) bool {
	now := w.now()
	for i, o := range w.plan.away {
		if o.server == server && o.from <= now && now < o.end && w.fires(away, fmt.Sprintf("%s for the %d. time", server, i+1)) {
			return true
		}
	}
	return false
}

// fires records a fault that was rolled, and reports whether it happens.
func (w *world) fires(k kind, where string) bool {
	if !w.happens(k, where) {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fired[name(k, where)] = true
	return true
}

// script returns the faults of transaction attempts.
func (w *world) script() []txretrytest.Fault {
	script := slices.Clone(w.plan.script)
	for i, f := range script {
		if !w.happens(kindOf(f), placeOf(i)) {
			script[i] = txretrytest.Fault{}
		}
	}
	return script
}

func (w *world) struck(attempt int, f txretrytest.Fault) { w.fires(kindOf(f), placeOf(attempt)) }

// happens reports whether a fault is not left out.
func (w *world) happens(k kind, where string) bool { return w.keep == nil || w.keep(name(k, where)) }

func name(k kind, where string) string { return string(k) + ": " + where }

// found records a broken promise.
func (w *world) found(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.findings = append(w.findings, fmt.Sprintf(format, args...))
}

// api returns a process that serves requests: the first choice if it is up, else another one; nil if none
// is.
func (w *world) api(choice int) *process {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range processes {
		if p := w.apis[(choice+i)%processes]; p != nil && !p.dead.Load() {
			p.requests.Add(1)
			return p
		}
	}
	return nil
}

func (w *world) setAPI(number int, p *process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.apis[number] = p
}

// process is one life of a process of the shop: from its start to its end or kill. A killed process runs on
// for a moment, because goroutines cannot be ended from outside. Nothing that it does has any effect.
type process struct {
	world *world
	name  string // role, number and life

	ctx      context.Context // ends when the process is asked to end, or is killed
	stop     context.CancelFunc
	alive    context.Context // ends when the process is killed
	bury     context.CancelFunc
	dead     atomic.Bool
	thaws    atomic.Int64 // end of the freeze, in nanoseconds of the schedule
	pace     float64      // speed of servers' clocks relative to its own
	requests sync.WaitGroup

	mu    sync.Mutex
	told  time.Duration     // when it was asked to end; 0: never
	steps map[string]uint64 // how often each step was taken
}

type processKey struct{}

// processOf returns the process that a context belongs to; nil for none.
func processOf(ctx context.Context) *process {
	p, _ := ctx.Value(processKey{}).(*process)
	return p
}

func (w *world) newProcess(role string, number, life int) *process {
	p := &process{world: w, name: fmt.Sprintf("%s-%d#%d", role, number, life), steps: map[string]uint64{}, pace: 1}
	if w.plan.has(fastClock) {
		p.pace = 1 / (1 + 2*w.dice.roll(p.name+" clock", 0).float())
	}
	p.alive, p.bury = context.WithCancel(context.WithValue(w.ctx, processKey{}, p))
	p.ctx, p.stop = context.WithCancel(p.alive)
	return p
}

// count returns how often the step was taken before.
func (p *process) count(step string) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.steps[step]++
	return p.steps[step] - 1
}

func (p *process) kill() {
	p.dead.Store(true)
	p.bury()
}

// tell asks the process to end, like SIGTERM.
func (p *process) tell() {
	p.mu.Lock()
	p.told = p.world.now()
	p.mu.Unlock()
	p.stop()
}

// unasked reports whether the process was never asked to end.
func (p *process) unasked() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.told == 0
}

// tooLong returns how long a process took to end after it was asked, and whether that is too long.
func (p *process) tooLong() (took time.Duration, tooLong bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	took = p.world.now() - max(p.told, time.Duration(p.thaws.Load()))
	return took, p.told != 0 && took > longestEnd
}

// longestEnd is how long a process may take to end: a call to each of three servers that hangs for 10 s,
// the maximum of a fault, plus the work that it has started.
const longestEnd = 45 * time.Second

// freeze stops the process for a while.
func (p *process) freeze(d time.Duration) { p.thaws.Store(int64(p.world.now() + d)) }

// thawed waits until the process is not frozen.
func (p *process) thawed() {
	for {
		left := time.Duration(p.thaws.Load()) - p.world.now()
		if left <= 0 {
			return
		}
		time.Sleep(left)
	}
}

// supervise keeps a process of a role running until the schedule ends. begin starts a life and returns a
// function that waits for its end.
func (w *world) supervise(role string, number int, begin func(p *process) func() error) {
	label := fmt.Sprintf("%s-%d", role, number)
	for life := 1; ; life++ {
		p := w.newProcess(role, number, life)
		wait := begin(p)
		ended := make(chan error, 1)
		go func() { ended <- wait() }()
		w.stopAt(p, life)
		context.AfterFunc(w.ending, p.tell)
		select {
		case <-p.alive.Done():
			w.unwind(ended)
		case err := <-ended:
			w.look(p, err)
		}
		p.bury()
		if w.ending.Err() != nil {
			return
		}
		time.Sleep(w.dice.roll(label+" restart", uint64(life)).between(50*time.Millisecond, 3*time.Second))
	}
}

// look records a broken promise in the end of a process that was not killed.
func (w *world) look(p *process, err error) {
	if p.dead.Load() {
		return
	}
	if err != nil {
		w.found("%s ended: %v", p.name, err)
	} else if p.unasked() {
		w.found("%s ended by itself", p.name)
	}
	if took, tooLong := p.tooLong(); tooLong {
		w.found("%s ended %v after it was asked to", p.name, took)
	}
}

// unwind waits for the goroutines of a killed process.
func (w *world) unwind(ended <-chan error) {
	w.remains.Add(1)
	go func() {
		defer w.remains.Done()
		<-ended
	}()
}

// stopAt asks a life to end at some time, if the plan says so.
func (w *world) stopAt(p *process, life int) {
	r := w.dice.roll(p.name+" stopped", uint64(life))
	after := r.next().between(time.Second, 40*time.Second)
	if !w.plan.has(stopped) || w.now()+after > w.plan.faulty || r.float() < 0.5 {
		return
	}
	time.AfterFunc(after, func() {
		if p.alive.Err() == nil && w.fires(stopped, p.name) {
			p.tell()
		}
	})
}

var (
	errDead = errors.New("sim: the process is dead")
	errFail = errors.New("sim: the connection failed")
	errAway = errors.New("sim: connection refused")
)

// Call implements shoptest.Wire.
func (w *world) Call(ctx context.Context, server, step string, do func() error) error {
	p := processOf(ctx)
	if w.choice != nil && step == shoptest.StepBegin {
		w.choice.begin()
	}
	if p == nil {
		return do() // a read by the observer
	}
	do = w.history.watch(ctx, step, do)
	n := p.count(step)
	if err := p.travel(ctx, step, n); err != nil {
		return err
	}
	if step != shoptest.StepTransaction && w.isAway(server) {
		return errAway
	}
	return p.faulty(ctx, step, n, do)
}

// faulty executes a step with its fault.
func (p *process) faulty(ctx context.Context, step string, n uint64, do func() error) error {
	k, r := p.world.fault(p.name, step, n)
	if k == stopped {
		p.tell()
	}
	inside := step == shoptest.StepBegin || step == shoptest.StepEnd
	switch k {
	case refused:
		if inside {
			return said([]string{"40001", "40P01", "55P03"}[r.below(3)])
		}
		return errFail
	case nacked:
		return &driver.PublishError{Class: driver.Retryable, Err: errFail}
	case hung:
		p.wait(ctx, r.between(time.Second, 9*time.Second))
		return errFail
	case killedBefore:
		p.kill()
		return errDead
	case frozenBefore:
		p.freeze(r.between(time.Second, 20*time.Second))
		if inside { // the server closes its connection after a while
			time.Sleep(5 * time.Second)
			return said("25P03")
		}
		p.thawed()
		if err := p.check(ctx); err != nil {
			return err
		}
	}
	err := do()
	switch k {
	case twice:
		err = errors.Join(err, do())
	case lost:
		return errFail
	case killedAfter:
		p.kill()
		return errDead
	case late:
		p.wait(ctx, r.between(time.Second, 9*time.Second))
	case frozenAfter:
		p.freeze(r.between(time.Second, 20*time.Second))
	}
	if inside {
		return err
	}
	return errors.Join(err, p.travel(ctx, step, n+1<<32))
}

// said returns an error answer of Postgres.
func said(state string) error { return &pgconn.PgError{Severity: "ERROR", Code: state, Message: "sim"} }

// travel delays a request or an answer. No two take the same time, so that their order does not depend on
// the scheduler.
func (p *process) travel(ctx context.Context, step string, n uint64) error {
	longest := 2 * time.Millisecond
	if p.world.plan.has(slowWire) {
		longest = 100 * time.Millisecond
	}
	r := p.world.dice.rollFor(p.name, step, n)
	f := r.float()
	time.Sleep(20*time.Microsecond + time.Duration(f*f*f*float64(longest)))
	p.thawed()
	return p.check(ctx)
}

// check returns the reason why the process cannot continue with a call.
func (p *process) check(ctx context.Context) error {
	if p.dead.Load() {
		return errDead
	}
	return ctx.Err()
}

// wait waits until the time is over or the context ends.
func (p *process) wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// Lease implements shoptest.Wire.
func (w *world) Lease(ctx context.Context, d time.Duration) time.Duration {
	p := processOf(ctx)
	if p == nil {
		return d
	}
	if k, _ := w.fault(p.name, stepLease, p.count(stepLease)); k == shortLease {
		return time.Nanosecond
	}
	return max(1, time.Duration(float64(d)*p.pace))
}

// outcomes are the outcomes of these faults at a queue.
var outcomes = map[kind]inboxtest.Outcome{
	refused: inboxtest.FailBefore, killedBefore: inboxtest.FailBefore,
	lost: inboxtest.FailAfter, killedAfter: inboxtest.FailAfter,
	hung: inboxtest.Hang, ended: inboxtest.EndSession, vanished: inboxtest.Lose, unwanted: inboxtest.Refuse,
}

// atQueue returns the outcome of a step between a consumer and its queue.
func (p *process) atQueue(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
	step := at.String()
	p.thawed()
	if p.dead.Load() || p.world.isAway(shoptest.RabbitMQ) {
		return inboxtest.FailBefore
	}
	k, r := p.world.fault(p.name, step, p.count(step))
	switch k {
	case stopped:
		p.tell()
	case killedBefore, killedAfter:
		p.kill()
	case frozenBefore:
		p.freeze(r.between(time.Second, 20*time.Second))
		p.thawed()
	case frozenAfter:
		p.freeze(r.between(time.Second, 20*time.Second))
	}
	return outcomes[k]
}

// fault rolls the fault of a process at the n-th time of a step.
func (w *world) fault(name, step string, n uint64) (kind, roll) {
	if w.choice != nil {
		return w.chosen(name, step, n)
	}
	if !w.isFaulty() {
		return "", 0
	}
	r := w.dice.rollFor(name, step, n+1<<33)
	x := r.float()
	for _, k := range possible[step] {
		if x -= w.plan.rates[k]; x < 0 {
			if w.fires(k, fmt.Sprintf("%s, %s %d", name, step, n)) {
				return k, r.next()
			}
			return "", 0
		}
	}
	return "", 0
}
