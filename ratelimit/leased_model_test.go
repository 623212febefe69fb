package ratelimit_test

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
)

const (
	leasing     = 50 // processes
	callersEach = 3
)

// leasedLimits are the limits that the processes charge: two are leased, and one never is.
var leasedLimits = []ratelimit.Limit{
	{Name: "sliding", Max: 3000, Window: 2 * time.Second},
	{Name: "fixed", Max: 2000, Window: time.Second, Algorithm: ratelimit.FixedWindow},
	{Name: "user", Max: 5, Window: time.Second},
}

// Fifty processes lease from one store whose clock drifts, while messages are lost or late, the store is unavailable
// at times, and processes die. Together they spend only what the exact algorithm would have admitted, and in each
// window a process spends at most the units granted for it.
func TestLeasedAgainstModel(t *testing.T) {
	t.Parallel()
	var all tallies
	for seed := range testenv.Sequences(t, 3) {
		synctest.Test(t, func(t *testing.T) {
			w := newLeasedWorld(t, uint64(seed), true)
			w.run(2 * time.Second)
			w.check()
			all.add(&w.tallies)
		})
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Logf("%v", &all)
	if 5*all.memory.Load() < all.trips.Load() || all.denied.Load() == 0 || all.refunded.Load() == 0 || all.crashed.Load() == 0 || all.lost.Load() == 0 || all.policy.Load() == 0 {
		t.Error("the run proves too little")
	}
}

// Without faults no units are lost: while there is demand a fixed window is used up to the last unit, and the
// remaining units of the processes are refunded at the end.
func TestLeasedUsesLimitsUp(t *testing.T) {
	t.Parallel()
	for seed := range testenv.Sequences(t, 1) {
		synctest.Test(t, func(t *testing.T) {
			w := newLeasedWorld(t, uint64(seed), false)
			w.run(3 * time.Second)
			w.check()
			w.checkUsedUp()
		})
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// tallies show whether a run exercised enough cases.
type tallies struct{ memory, trips, denied, refunded, crashed, lost, policy atomic.Int64 }

func (a *tallies) add(b *tallies) {
	a.memory.Add(b.memory.Load())
	a.trips.Add(b.trips.Load())
	a.denied.Add(b.denied.Load())
	a.refunded.Add(b.refunded.Load())
	a.crashed.Add(b.crashed.Load())
	a.lost.Add(b.lost.Load())
	a.policy.Add(b.policy.Load())
}

// leasedWorld is the store, the processes and the recorded events.
type leasedWorld struct {
	t      *testing.T
	seed   uint64
	random *rand.Rand
	faults bool
	share  int64
	store  *exactStore
	tallies

	mu     sync.Mutex
	events []leasedEvent
	all    []*leasedProcess // every process that ever ran
}

// leasedEvent is a spent charge, or a refund by its caller.
type leasedEvent struct {
	counter counterOf
	at      int64 // by the store's clock
	window  int64 // the window in which it counts
	cost    int64
}

// counterOf names a counter in one window.
type counterOf struct {
	limit ratelimit.Limit
	key   string
}

func newLeasedWorld(t *testing.T, seed uint64, faults bool) *leasedWorld {
	random := rand.New(rand.NewPCG(19, seed))
	share := int64(100)
	if faults {
		share = []int64{1, 10, 100}[seed%3]
	}
	w := &leasedWorld{t: t, seed: seed, random: random, faults: faults, share: share}
	w.store = &exactStore{counts: map[counterOf]map[int64]int64{}, read: time.Now(), rate: 10_000}
	w.store.now = time.Duration(w.store.read.UnixNano()) + time.Duration(random.Int64N(int64(time.Hour)))
	return w
}

// run makes all processes charge for a while. One after the other dies and is started again.
func (w *leasedWorld) run(length time.Duration) {
	ctx, cancel := context.WithTimeout(w.t.Context(), length) // timing: how long the model runs
	defer cancel()
	running := make([]*leasedProcess, leasing)
	for i := range running {
		running[i] = w.start(ctx)
	}
	for runloop.Sleep(ctx, 50*time.Millisecond) == nil {
		w.store.drift(w.random)
		if !w.faults {
			continue
		}
		w.store.down.Store(w.random.IntN(12) == 0)
		if w.random.IntN(4) == 0 {
			i := w.random.IntN(leasing)
			running[i].crash()
			w.crashed.Add(1)
			running[i] = w.start(ctx)
		}
	}
	w.store.down.Store(false)
	for _, p := range w.all { // crashed processes still have running calls
		p.end()
	}
}

// start starts a process, which charges until ctx ends.
func (w *leasedWorld) start(ctx context.Context) *leasedProcess {
	p := &leasedProcess{w: w, granted: map[counterOf]map[int64]int64{}, spent: map[counterOf]map[int64]int64{}, open: w.random.IntN(2) == 0}
	w.all = append(w.all, p)
	l, err := ratelimit.NewLeased(p, ratelimit.LeasedConfig{Share: w.share})
	if err != nil {
		w.t.Fatal(err)
	}
	p.leased = l
	ctx, p.stop = context.WithCancel(ctx)
	run, stopRun := context.WithCancel(context.WithoutCancel(ctx))
	p.stopRun = stopRun
	p.running.Go(func() {
		if err := l.Run(run); err != nil {
			w.t.Error(err)
		}
	})
	for range callersEach {
		random := rand.New(rand.NewPCG(w.seed, w.random.Uint64()))
		p.callers.Go(func() { p.charge(ctx, random) })
	}
	return p
}

// check replays all spent charges in the order of time.
func (w *leasedWorld) check() {
	w.t.Helper()
	slices.SortStableFunc(w.events, func(a, b leasedEvent) int { return cmp.Compare(a.at, b.at) })
	counts := map[counterOf]map[int64]int64{}
	for i, e := range w.events {
		if counts[e.counter] == nil {
			counts[e.counter] = map[int64]int64{}
		}
		counts[e.counter][e.window] += e.cost
		if over := over(e.counter.limit, counts[e.counter], e.at); over > 0 && !w.laterInTheSame(i) {
			w.t.Fatalf("%s %q: at %d %d more was spent than the limit has", e.counter.limit.Name, e.counter.key, e.at, over)
		}
	}
	for _, p := range w.all {
		p.check()
	}
}

// laterInTheSame reports whether the same millisecond has further events of the same counter. The last one is
// checked.
func (w *leasedWorld) laterInTheSame(i int) bool {
	for _, e := range w.events[i+1:] {
		if e.at != w.events[i].at {
			return false
		}
		if e.counter == w.events[i].counter {
			return true
		}
	}
	return false
}

// over returns how many more units were spent than the limit has, rounded up.
func over(l ratelimit.Limit, byWindow map[int64]int64, at int64) int64 {
	ms := l.Window.Milliseconds()
	used := byWindow[at/ms] * ms
	if l.Algorithm == ratelimit.SlidingWindow {
		used += byWindow[at/ms-1] * (ms - at%ms)
	}
	return max(0, used-l.Max*ms+ms-1) / ms
}

// checkUsedUp fails unless each whole window of the fixed limit is used up to the last unit.
func (w *leasedWorld) checkUsedUp() {
	w.t.Helper()
	byWindow := map[int64]int64{}
	for _, e := range w.events {
		if e.counter.limit.Algorithm == ratelimit.FixedWindow {
			byWindow[e.window] += e.cost
		}
	}
	windows := slices.Sorted(func(yield func(int64) bool) {
		for n := range byWindow {
			if !yield(n) {
				return
			}
		}
	})
	for _, n := range windows[1 : len(windows)-1] {
		if byWindow[n] != leasedLimits[1].Max {
			w.t.Errorf("window %d: %d of %d were spent", n, byWindow[n], leasedLimits[1].Max)
		}
	}
}

// leasedProcess is one process with its connection to the store: a Limiter that delays, loses and counts calls.
type leasedProcess struct {
	w       *leasedWorld
	open    bool // allows calls that the store does not answer
	leased  *ratelimit.Leased
	stop    context.CancelFunc
	stopRun context.CancelFunc
	callers sync.WaitGroup
	running sync.WaitGroup
	dead    atomic.Bool
	unsound atomic.Int64 // units in lost messages

	mu             sync.Mutex
	granted, spent map[counterOf]map[int64]int64 // by window
}

// crash ends the process at once: nothing from it reaches the store afterwards.
func (p *leasedProcess) crash() {
	p.mu.Lock()
	p.dead.Store(true)
	p.mu.Unlock()
	p.stop()
	p.stopRun()
}

// end shuts the process down cleanly.
func (p *leasedProcess) end() {
	p.stop()
	p.callers.Wait()
	p.stopRun()
	p.running.Wait()
}

// check compares the spent units with the granted units, window by window.
func (p *leasedProcess) check() {
	p.w.t.Helper()
	for counter, byWindow := range p.granted {
		for n, granted := range byWindow {
			stranded := granted - p.spent[counter][n]
			// Two leases, because one may be in a running call, and the calls of the callers.
			most := 2*counter.limit.Max/p.w.share + 3*callersEach + p.unsound.Load()
			if stranded < 0 || stranded > most || stranded > 0 && !p.dead.Load() && p.unsound.Load() == 0 {
				p.w.t.Errorf("%s %q: %d were granted in window %d and %d spent (dead: %v, %d in lost messages)",
					counter.limit.Name, counter.key, granted, n, granted-stranded, p.dead.Load(), p.unsound.Load())
			}
		}
	}
	for counter, byWindow := range p.spent {
		for n, spent := range byWindow {
			if granted := p.granted[counter][n]; spent > granted {
				p.w.t.Errorf("%s %q: %d were granted in window %d and %d spent", counter.limit.Name, counter.key, granted, n, spent)
			}
		}
	}
}

// tripsOf is the context key of the number of calls to the store.
type tripsOf struct{}

// charge charges and refunds at random until ctx ends.
func (p *leasedProcess) charge(ctx context.Context, random *rand.Rand) {
	busy := time.Duration(4+random.IntN(60)) * time.Millisecond
	for runloop.Sleep(ctx, time.Duration(random.Int64N(int64(busy)))) == nil {
		var charges []ratelimit.Charge
		for i, limit := range leasedLimits {
			c := ratelimit.Charge{Limit: limit, Cost: 1 + random.Int64N(3)}
			if limit.Name == "user" {
				c.Key = string(rune('a' + random.IntN(20)))
			}
			if random.IntN([]int{2, 2, 5}[i]) == 0 {
				charges = append(charges, c)
			}
		}
		if len(charges) == 0 {
			continue
		}
		var trips atomic.Int64
		d, err := p.leased.Allow(context.WithValue(ctx, tripsOf{}, &trips), charges...)
		switch {
		case err != nil:
			p.w.policy.Add(1)
		case d.Fallback:
			p.w.policy.Add(1)
			for _, c := range charges { // leased units of them are spent, and not counted here
				p.unsound.Add(c.Cost)
			}
		case !d.Allowed:
			p.w.denied.Add(1)
		default:
			p.spend(d, trips.Load() == 0)
			if p.w.faults && random.IntN(10) == 0 && runloop.Sleep(ctx, time.Duration(random.Int64N(int64(300*time.Millisecond)))) == nil {
				p.refund(ctx, d)
			}
		}
	}
}

// spend records an allowed decision: from memory at this moment, from the store at the decision's time.
func (p *leasedProcess) spend(d ratelimit.Decision, memory bool) {
	at := d.At.UnixMilli()
	if memory {
		if at = p.w.store.clock(); d.At.UnixMilli() < at {
			p.w.t.Errorf("decided for %v, %d by the store's clock: before what others may have been admitted", d.At, at)
		}
	}
	for _, c := range d.Charges() {
		ms := c.Limit.Window.Milliseconds()
		if c.At.UnixMilli()/ms != at/ms {
			p.w.t.Errorf("%s: decided for %v at %d by the store's clock", c.Limit.Name, c.At, at)
		}
		p.note(c, at, c.Cost)
	}
	if memory {
		p.w.memory.Add(1)
	} else {
		p.w.trips.Add(1)
	}
}

func (p *leasedProcess) refund(ctx context.Context, d ratelimit.Decision) {
	for _, c := range d.Charges() { // before the store may grant the units to others
		p.note(c, p.w.store.clock(), -c.Cost)
	}
	if p.leased.Refund(ctx, d.Charges()...) == nil {
		p.w.refunded.Add(1)
	}
}

func (p *leasedProcess) note(c ratelimit.Charge, at, cost int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead.Load() {
		return
	}
	counter, n := counterOf{c.Limit, c.Key}, c.At.UnixMilli()/c.Limit.Window.Milliseconds()
	bump(p.spent, counter, n, cost)
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	p.w.events = append(p.w.events, leasedEvent{counter, at, n, cost})
}

func bump(counts map[counterOf]map[int64]int64, counter counterOf, window, by int64) {
	if counts[counter] == nil {
		counts[counter] = map[int64]int64{}
	}
	counts[counter][window] += by
}

// Allow implements ratelimit.Limiter over a network.
func (p *leasedProcess) Allow(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	ctx.Value(tripsOf{}).(*atomic.Int64).Add(1)
	if err := p.way(ctx); err != nil {
		return p.unavailable(ctx)
	}
	p.mu.Lock()
	if p.dead.Load() {
		p.mu.Unlock()
		return p.unavailable(ctx)
	}
	d, err := p.w.store.decide(charges)
	for _, c := range d.Charges() {
		bump(p.granted, counterOf{c.Limit, c.Key}, d.At.UnixMilli()/c.Limit.Window.Milliseconds(), c.Cost)
	}
	p.mu.Unlock()
	if err != nil {
		p.w.t.Error(err)
	}
	if p.way(ctx) != nil {
		for _, c := range d.Charges() {
			p.unsound.Add(c.Cost)
			p.w.lost.Add(c.Cost)
		}
		return p.unavailable(ctx)
	}
	return d, err
}

// Refund implements ratelimit.Limiter over a network.
func (p *leasedProcess) Refund(ctx context.Context, charges ...ratelimit.Charge) error {
	err := p.way(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range charges {
		back := int64(0)
		if err == nil && !p.dead.Load() {
			back = p.w.store.refund(c)
			bump(p.granted, counterOf{c.Limit, c.Key}, c.At.UnixMilli()/c.Limit.Window.Milliseconds(), -back)
		}
		p.unsound.Add(c.Cost - back)
	}
	return err
}

// way delays a message, and sometimes loses it.
func (p *leasedProcess) way(ctx context.Context) error {
	delay := time.Duration(rand.Int64N(int64(2 * time.Millisecond)))
	if p.w.faults && rand.IntN(100) == 0 {
		delay = time.Duration(rand.Int64N(int64(600 * time.Millisecond)))
	}
	if runloop.Sleep(ctx, delay) != nil || p.w.faults && rand.IntN(200) == 0 || p.w.store.down.Load() {
		return ratelimit.ErrUnavailable
	}
	return nil
}

func (p *leasedProcess) unavailable(ctx context.Context) (ratelimit.Decision, error) {
	switch {
	case ctx.Err() != nil:
		return ratelimit.Decision{}, ctx.Err()
	case p.open:
		return ratelimit.Decision{Allowed: true, Fallback: true}, nil
	}
	return ratelimit.Decision{}, ratelimit.ErrUnavailable
}

// exactStore decides one call after the other, by a clock with a changing speed.
type exactStore struct {
	down atomic.Bool

	mu     sync.Mutex
	counts map[counterOf]map[int64]int64
	read   time.Time     // when now was computed
	now    time.Duration // since the Unix epoch
	rate   int64         // speed of the clock, in ten thousandths
}

func (s *exactStore) drift(random *rand.Rand) {
	s.clock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rate = 9_910 + random.Int64N(181)
}

func (s *exactStore) clock() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tick()
}

func (s *exactStore) tick() int64 {
	now := time.Now()
	s.now += now.Sub(s.read) / 10_000 * time.Duration(s.rate)          // timing: a clock with another speed
	s.now += now.Sub(s.read) % 10_000 * time.Duration(s.rate) / 10_000 // timing: a clock with another speed
	s.read = now
	return s.now.Milliseconds()
}

func (s *exactStore) decide(charges []ratelimit.Charge) (d ratelimit.Decision, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	charges, err = ratelimit.Charges(charges).Normalize()
	if err != nil {
		return d, err
	}
	at := s.tick()
	counters := make([]struct{ Prev, Cur int64 }, len(charges))
	for i, c := range charges {
		n := at / c.Limit.Window.Milliseconds()
		byWindow := s.counts[counterOf{c.Limit, c.Key}]
		counters[i].Prev, counters[i].Cur = byWindow[n-1], byWindow[n]
	}
	d.Decide(time.UnixMilli(at), 0, true, charges, counters)
	for _, c := range d.Charges() {
		bump(s.counts, counterOf{c.Limit, c.Key}, at/c.Limit.Window.Milliseconds(), c.Cost)
	}
	return d, nil
}

// refund returns the number of units by which the counter fell.
func (s *exactStore) refund(c ratelimit.Charge) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	ms := c.Limit.Window.Milliseconds()
	counter, n := counterOf{c.Limit, c.Key}, c.At.UnixMilli()/ms
	if age := s.tick()/ms - n; age < 0 || age > 1 {
		return 0
	}
	back := min(c.Cost, s.counts[counter][n])
	bump(s.counts, counter, n, -back)
	return back
}
