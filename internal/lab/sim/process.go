package sim

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// process is one life of a process of the shop: from its start to its end, or until it is killed. A
// process that is killed goes on for a moment, as goroutines cannot be ended from outside; nothing that
// it does reaches anybody any more.
type process struct {
	world *world
	name  string // role, number and life

	ctx      context.Context // ends when it is told to end, or is killed
	stop     context.CancelFunc
	alive    context.Context // ends when it is killed
	bury     context.CancelFunc
	dead     atomic.Bool
	thaws    atomic.Int64 // when it is frozen no longer, in nanoseconds of the schedule
	pace     float64      // of servers' clocks, by its own
	requests sync.WaitGroup

	mu    sync.Mutex
	told  time.Duration     // when it was told to end; 0: it was not
	steps map[string]uint64 // how often each was taken
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

// tell has the process end by itself, as SIGTERM does.
func (p *process) tell() {
	p.mu.Lock()
	p.told = p.world.now()
	p.mu.Unlock()
	p.stop()
}

// unasked reports whether the process was never told to end.
func (p *process) unasked() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.told == 0
}

// tooLong reports how long a process took to end that was told to, if that is too long.
func (p *process) tooLong() (took time.Duration, tooLong bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	took = p.world.now() - max(p.told, time.Duration(p.thaws.Load()))
	return took, p.told != 0 && took > longestEnd
}

// longestEnd is how long a process may take to end: a call to each of three servers that hangs for 10 s, as
// long as a fault lasts at most, and what it has begun.
const longestEnd = 45 * time.Second

// freeze has the process stand still for a while.
func (p *process) freeze(d time.Duration) { p.thaws.Store(int64(p.world.now() + d)) }

// thawed waits while the process stands still.
func (p *process) thawed() {
	for {
		left := time.Duration(p.thaws.Load()) - p.world.now()
		if left <= 0 {
			return
		}
		time.Sleep(left)
	}
}

// supervise keeps a process of a role running until the schedule ends. begin starts a life and returns what
// waits for its end.
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

// look notes what is wrong with the end of a process that was not killed.
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
		w.found("%s ended %v after it was told to", p.name, took)
	}
}

// unwind waits for what is left of a killed process.
func (w *world) unwind(ended <-chan error) {
	w.remains.Add(1)
	go func() {
		defer w.remains.Done()
		<-ended
	}()
}

// stopAt has a life told to end at some time, where the plan has that.
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
