package engine_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
)

const (
	worldMessages = 150
	worldKeys     = 6
	worldTrouble  = 2 * time.Minute // no faults after that
	worldNap      = time.Second     // of a handler, at most
	worldHealing  = 5 * time.Minute // until everything is settled
)

// world is one random history: several consumers of one queue, whose transport and handlers fail at random
// for some time.
type world struct {
	t      *testing.T
	seed   uint64
	broker *memqueue.Broker
	queue  *memqueue.Queue
	ledger driver.Ledger

	ordered  bool
	calm     bool // no faults of the transport, no handler that hangs
	shutdown time.Duration
	faulty   float64 // of the transport's calls
	failing  float64 // of the handlers' runs
	hanging  float64
	config   inbox.ConsumerConfig
	options  memqueue.Options
	hold     time.Duration

	mu      sync.Mutex
	rand    *rand.Rand
	over    bool // the faults have ended
	number  map[uuid.UUID]int
	done    map[uuid.UUID]int      // runs after the effect
	effects map[string][]uuid.UUID // by key
	calls   int
	out     time.Time // when the outage ends
}

func newWorld(t *testing.T, seed uint64) *world {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	w := &world{
		t: t, seed: seed, rand: r, broker: memqueue.NewBroker(),
		number: map[uuid.UUID]int{}, done: map[uuid.UUID]int{}, effects: map[string][]uuid.UUID{},
	}
	w.queue = w.broker.Queue("orders")
	w.ordered, w.calm = r.IntN(2) == 0, r.IntN(4) == 0
	if r.IntN(2) == 0 {
		w.ledger = memory.NewLedger()
	}
	w.shutdown = []time.Duration{2 * time.Second, 20 * time.Second, time.Minute}[r.IntN(3)]
	w.failing = []float64{0, 0.1, 0.5}[r.IntN(3)]
	if w.calm {
		w.shutdown = time.Minute
	} else {
		w.faulty, w.hanging = []float64{0, 0.01, 0.1}[r.IntN(3)], []float64{0, 0.01}[r.IntN(2)]
	}
	if r.IntN(3) == 0 {
		w.hold = 20 * time.Second
	}
	concurrency := 1 + r.IntN(5)
	batch := []int{1, 1, 4, 10}[r.IntN(4)]
	w.config = inbox.ConsumerConfig{
		Concurrency: concurrency, Batch: batch, Prefetch: concurrency * (1 + r.IntN(8)), Ordered: w.ordered,
		HandlerTimeout: 5 * time.Second, ShutdownTimeout: w.shutdown,
		Retry: inbox.RetryPolicy{MaxAttempts: []int{3, 1000}[r.IntN(2)], BaseDelay: 100 * time.Millisecond, MaxDelay: 500 * time.Millisecond},
	}
	w.options = memqueue.Options{Exclusive: w.ordered, Split: r.IntN(2) == 0, Fault: w.fault}
	return w
}

func (w *world) chance(p float64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.over && w.rand.Float64() < p
}

func (w *world) pick(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rand.IntN(n)
}

func (w *world) fault(step memqueue.Step, _ *inbox.Message) memqueue.Outcome {
	if !w.chance(w.faulty) {
		return memqueue.OK
	}
	return memqueue.FailBefore + memqueue.Outcome(w.pick(int(memqueue.Refuse-memqueue.FailBefore)+1))
}

// Process deduplicates and fails at random.
func (w *world) Process(_ context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		w.mu.Lock()
		w.calls++
		w.mu.Unlock()
		results[i] = w.handle(m, len(msgs) == 1)
	}
	return results
}

// handle processes one message. In a batch it does not end the call.
func (w *world) handle(m *inbox.Message, alone bool) error {
	nap := time.Duration(w.pick(int(worldNap)/20)) * time.Duration(w.pick(3))
	if w.chance(0.05) {
		nap = worldNap
	}
	if w.chance(w.hanging) {
		nap = 30 * time.Second
	}
	time.Sleep(nap)
	if w.isOut() {
		return inbox.Unavailable(errBroken)
	}
	if w.chance(w.failing) {
		return w.failure(alone)
	}
	if m.Name == "dead" {
		return inbox.Unrecoverable(errBroken)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, repeated := w.done[m.ID]; repeated {
		w.done[m.ID]++
		return nil
	}
	w.done[m.ID] = 0
	w.effects[m.Key] = append(w.effects[m.Key], m.ID)
	return nil
}

func (w *world) failure(alone bool) error {
	switch n := w.pick(8); {
	case n == 0 && alone:
		panic("oops")
	case n == 1 && alone:
		runtime.Goexit()
	case n == 2:
		return inbox.Unavailable(errBroken)
	case n == 3:
		return inbox.Postpone(errBroken, 300*time.Millisecond)
	case n == 4:
		return inbox.RetryAfter(errBroken, 700*time.Millisecond)
	case n == 5:
		return inbox.ErrDraining
	}
	return errBroken
}

func (w *world) isOut() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.over && time.Now().Before(w.out)
}

func (w *world) Limit(name string) int {
	if name == "scarce" {
		return 1
	}
	return 0
}

// put sends a message of a random kind.
func (w *world) put(n int) {
	m := &inbox.Message{ID: ids.New(), Name: []string{"plain", "plain", "scarce", "dead"}[w.pick(4)], Key: fmt.Sprint("k", w.pick(worldKeys)), Body: []byte(strconv.Itoa(n))}
	if w.pick(20) == 0 {
		m.ID = uuid.Nil // rejected; the body identifies it
	} else if w.pick(10) == 0 {
		m.Key = ""
	}
	w.mu.Lock()
	w.number[m.ID] = n
	w.mu.Unlock()
	if err := w.queue.Put(m); err != nil {
		w.t.Error(err)
	}
}

// heldSource is the source of one process, for some seeds with a broker that takes unsettled messages back.
type heldSource struct {
	*memqueue.Source
	hold time.Duration
}

func (s heldSource) Traits() driver.Traits {
	t := s.Source.Traits()
	t.Hold = s.hold
	return t
}

// live runs one process after the other, each for some time.
func (w *world) live(ctx context.Context) {
	for ctx.Err() == nil {
		var p inbox.Processor = limitedWorld{w}
		if w.ledger != nil {
			p = trackedWorld{limitedWorld{w}, w.ledger}
		}
		cfg := w.config
		switch w.pick(4) {
		case 0:
			cfg.TimeLimit = time.Second + time.Duration(w.pick(20))*time.Second
		case 1:
			cfg.MessageLimit = 1 + w.pick(40)
		}
		c := newConsumer(w.t, heldSource{w.queue.Source(w.options), w.hold}, p, engine.Config{ConsumerConfig: cfg})
		life, end := context.WithCancel(ctx)
		var asked time.Time
		time.AfterFunc(time.Duration(1+w.pick(60))*time.Second, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			if !w.over {
				asked = time.Now()
				end()
			}
		})
		stopped := context.AfterFunc(ctx, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			asked = time.Now()
		})
		if err := c.Run(life); err != nil {
			w.t.Error(err)
		}
		stopped()
		w.mu.Lock()
		if took := time.Since(asked); !asked.IsZero() {
			if took > w.shutdown || w.calm && took > worldNap*time.Duration(cfg.Batch)+5*time.Second {
				w.t.Errorf("seed %d: it took %v to stop", w.seed, took)
			}
		}
		w.mu.Unlock()
		end()
	}
}

type limitedWorld struct{ *world }

type trackedWorld struct {
	limitedWorld
	ledger driver.Ledger
}

func (p trackedWorld) Ledger() driver.Ledger    { return p.ledger }
func (p trackedWorld) Retention() time.Duration { return driver.DefaultRetention }

// trouble cuts sessions and causes outages while messages arrive.
func (w *world) trouble() {
	began := time.Now()
	for n := 0; time.Since(began) < worldTrouble; {
		for range 5 {
			if n < worldMessages {
				w.put(n)
				n++
			}
		}
		time.Sleep(time.Duration(w.pick(4000)) * time.Millisecond)
		switch w.pick(6) {
		case 0:
			if !w.calm {
				w.queue.Cut()
			}
		case 1:
			w.mu.Lock()
			w.out = time.Now().Add(time.Duration(w.rand.IntN(8)) * time.Second)
			w.mu.Unlock()
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
}

func (w *world) run() {
	ctx, cancel := context.WithCancel(context.Background())
	var processes sync.WaitGroup
	for range 1 + w.pick(3) {
		processes.Go(func() { w.live(ctx) })
	}
	w.trouble()
	idle, end := context.WithTimeout(ctx, worldHealing)
	defer end()
	if err := w.broker.Idle(idle); err != nil {
		w.t.Errorf("seed %d: messages are stuck", w.seed)
	}
	cancel()
	processes.Wait()
	synctest.Wait()
	time.Sleep(time.Hour) // for messages left behind
	w.check()
}

// check verifies that each message had its effect once or is a dead letter, and that the effects of each key
// are in order.
func (w *world) check() {
	dead := map[string]bool{}
	for _, class := range driver.AllClasses(nil) {
		err := w.queue.Source(memqueue.Options{}).DeadLetters().Scan(context.Background(), class, func(d *inbox.DeadLetter) (driver.Outcome, error) {
			dead[string(d.Message.Body)] = true
			return driver.Keep, nil
		}, func(inbox.DeadLetter, error) {})
		if err != nil {
			w.t.Error(err)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	has := map[int]bool{}
	for id := range w.done {
		has[w.number[id]] = true
	}
	for n := range worldMessages {
		if !has[n] && !dead[strconv.Itoa(n)] {
			w.t.Errorf("seed %d: message %d is lost", w.seed, n)
		}
	}
	if w.ordered {
		w.checkOrder(dead)
	}
	w.checkRepeats()
}

// checkRepeats verifies that no successful message was processed again unless a session was lost, and that no
// message was processed over and over.
func (w *world) checkRepeats() {
	repeats := 0
	for _, n := range w.done {
		repeats += n
	}
	if repeats > 0 && w.calm && (!w.ordered || w.hold == 0) {
		w.t.Errorf("seed %d: %d messages processed again", w.seed, repeats)
	}
	if w.calls > 200*worldMessages {
		w.t.Errorf("seed %d: %d messages were processed %d times", w.seed, worldMessages, w.calls)
	}
}

// checkOrder skips dead letters: their former consumer may have continued.
func (w *world) checkOrder(dead map[string]bool) {
	for key, all := range w.effects {
		last := -1
		for _, id := range all {
			n := w.number[id]
			if key == "" || dead[strconv.Itoa(n)] {
				continue
			}
			if n < last {
				w.t.Errorf("seed %d: key %s: %d came after %d", w.seed, key, n, last)
			}
			last = max(last, n)
		}
	}
}

// Under all faults, each message has its effect once or becomes a dead letter, none is stuck, and keys keep
// their order. ENGINE_SEEDS is the number of histories, ENGINE_SEED selects one.
func TestRandomFaults(t *testing.T) {
	t.Parallel()
	first, seeds := uint64(1), 60
	if n, err := strconv.Atoi(os.Getenv("ENGINE_SEEDS")); err == nil {
		first, seeds = rand.Uint64N(1<<40), n
	}
	if n, err := strconv.ParseUint(os.Getenv("ENGINE_SEED"), 10, 64); err == nil {
		first, seeds = n, 1
	}
	for i := range uint64(seeds) {
		t.Run(fmt.Sprint("seed ", first+i), func(t *testing.T) {
			bubble(t, func(t *testing.T) { newWorld(t, first+i).run() })
		})
	}
}
