package engine_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// withParking is a processor that keeps messages of keys that wait.
type withParking struct {
	withLedger
	parking driver.Parking
}

func (p withParking) Parking(bool) driver.Parking { return p.parking }

// yard is a queue with consumers that park keys, and what their handlers have done.
type yard struct {
	t       *testing.T
	broker  *memqueue.Broker
	queue   *memqueue.Queue
	ledger  *memory.Ledger
	parking driver.Parking
	fail    func(m *inbox.Message) error

	mu      sync.Mutex
	number  map[uuid.UUID]int
	done    map[uuid.UUID]bool
	removed map[uuid.UUID]bool
	order   map[string][]int
}

func newYard(t *testing.T) *yard {
	t.Helper()
	broker := memqueue.NewBroker()
	return &yard{
		t: t, broker: broker, queue: broker.Queue("orders"), ledger: memory.NewLedger(), parking: memory.NewParking(),
		number: map[uuid.UUID]int{}, done: map[uuid.UUID]bool{}, removed: map[uuid.UUID]bool{}, order: map[string][]int{},
	}
}

func (y *yard) put(key string, numbers ...int) (last uuid.UUID) {
	y.t.Helper()
	for _, n := range numbers {
		last = ids.New()
		y.mu.Lock()
		y.number[last] = n
		y.mu.Unlock()
		if err := y.queue.Put(&inbox.Message{ID: last, Name: "order", Key: key, Body: []byte("{}")}); err != nil {
			y.t.Error(err)
		}
	}
	return last
}

// process is a handler with deduplication.
func (y *yard) process(m *inbox.Message) error {
	y.mu.Lock()
	done := y.done[m.ID]
	y.mu.Unlock()
	if done {
		return nil
	}
	if err := y.fail(m); err != nil {
		return err
	}
	y.mu.Lock()
	defer y.mu.Unlock()
	if !y.done[m.ID] {
		y.done[m.ID] = true
		if !y.removed[m.ID] {
			y.order[m.Key] = append(y.order[m.Key], y.number[m.ID])
		}
	}
	return nil
}

// numberOf is the number that a message was put with.
func (y *yard) numberOf(m *inbox.Message) int {
	y.mu.Lock()
	defer y.mu.Unlock()
	return y.number[m.ID]
}

func (y *yard) consumer(change func(*engine.Config), o memqueue.Options) *engine.Consumer {
	y.t.Helper()
	p := withParking{withLedger{processorFunc(func(_ context.Context, m *inbox.Message) error { return y.process(m) }), y.ledger}, y.parking}
	cfg := engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true, ParkKeys: true}}
	change(&cfg)
	o.Exclusive = true
	return newConsumer(y.t, y.queue.Source(o), p, cfg)
}

func (y *yard) letters() inbox.DeadLetters {
	letters := driver.WithParked(y.queue.Source(memqueue.Options{}).Letters(), y.parking)
	return driver.NewDeadLetters(letters, driver.DefaultRetention, slog.New(slog.DiscardHandler))
}

func (y *yard) count() int {
	n, err := y.letters().Count(context.Background(), inbox.Filter{})
	if err != nil {
		y.t.Error(err)
	}
	return n
}

func (y *yard) replay(f inbox.Filter) int {
	done, err := y.letters().Replay(context.Background(), f, inbox.Replay{By: "test", Force: true})
	if err != nil {
		y.t.Error(err)
	}
	return done.Returned
}

// parked are the keys with messages in the Parking.
func (y *yard) parked() []driver.Head {
	heads, err := y.parking.Heads(context.Background(), "", 1000)
	if err != nil {
		y.t.Error(err)
	}
	return heads
}

func (y *yard) orderOf(key string) []int {
	y.mu.Lock()
	defer y.mu.Unlock()
	return slices.Clone(y.order[key])
}

func (y *yard) idle() {
	y.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	noError(y.t, y.broker.Idle(ctx))
}

// run runs a consumer until the returned function is called.
func run(t *testing.T, c *engine.Consumer) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := c.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(stop)
	return stop
}

// A key waits behind its dead letter, others go on. Replayed or removed, it resumes in order, in a process that has
// received nothing of it, too.
func TestParkedKey(t *testing.T) {
	t.Parallel()
	for name, removed := range map[string]bool{"replay": false, "remove": true, "quiet queue": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				y := newYard(t)
				var mended atomic.Bool
				y.fail = func(m *inbox.Message) error {
					if m.Key == "a" && y.numberOf(m) == 2 && !mended.Load() {
						return inbox.Unrecoverable(errBroken)
					}
					return nil
				}
				stop := run(t, y.consumer(func(*engine.Config) {}, memqueue.Options{}))
				y.put("a", 1, 2, 3, 4)
				y.put("b", 1, 2, 3)
				y.put("", 1)
				y.idle() // the messages behind the dead letter do not fill the window
				y.put("a", 5)
				y.idle()
				if got := y.orderOf("a"); !slices.Equal(got, []int{1}) || len(y.orderOf("b")) != 3 || y.count() != 1 {
					t.Fatalf("a has done %v, b %v; %d dead letters", got, y.orderOf("b"), y.count())
				}
				stop()
				run(t, y.consumer(func(*engine.Config) {}, memqueue.Options{})) // as another process
				want := []int{1, 2, 3, 4, 5, 6, 7}
				if name == "quiet queue" {
					want = slices.Delete(want, 5, 6)
				} else {
					y.put("b", 4)
					y.put("a", 6)
					y.idle()
				}
				time.Sleep(time.Hour)
				if got := y.orderOf("a"); !slices.Equal(got, []int{1}) {
					t.Fatalf("after an hour a has done %v", got)
				}
				mended.Store(true)
				if removed {
					want = slices.Delete(want, 1, 2)
					if n, err := y.letters().Remove(context.Background(), inbox.Filter{}, inbox.Removal{By: "test"}); n != 1 || err != nil {
						t.Fatalf("removed %d, error %v", n, err)
					}
				} else if n := y.replay(inbox.Filter{}); n != 1 {
					t.Fatalf("replayed %d", n)
				}
				time.Sleep(time.Minute)
				if got := y.orderOf("a"); !slices.Equal(got, want[:len(want)-1]) {
					t.Errorf("in a minute a has done %v, want %v and 7 later", got, want)
				}
				y.put("a", 7)
				y.idle()
				if got := y.orderOf("a"); !slices.Equal(got, want) || len(y.parked()) != 0 || y.count() != 0 {
					t.Errorf("in the end a has done %v, want %v; parked %v", got, want, y.parked())
				}
			})
		})
	}
}

// Messages without a name are not parked, nor do they stop their keys.
func TestParkedKeyAndInvalidMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		y := newYard(t)
		y.fail = func(*inbox.Message) error { return nil }
		run(t, y.consumer(func(*engine.Config) {}, memqueue.Options{}))
		for range 2 {
			noError(t, y.queue.Put(&inbox.Message{Name: "order", Key: "a"}))
		}
		y.put("a", 1)
		y.idle()
		if got := y.orderOf("a"); !slices.Equal(got, []int{1}) || y.count() != 2 || len(y.parked()) != 0 {
			t.Errorf("done %v, %d dead letters, parked %v", got, y.count(), y.parked())
		}
	})
}

// slowAnswers is a Parking whose answers that a key has nothing left are late.
type slowAnswers struct {
	driver.Parking
	meanwhile func()
}

func (s slowAnswers) Claim(ctx context.Context, key string, l driver.Lease) (*inbox.Message, bool, error) {
	m, there, err := s.Parking.Claim(ctx, key, l)
	if !there {
		s.meanwhile()
	}
	return m, there, err
}

// A message that is stored while the key's last one ends is not overtaken.
func TestParkedKeyThatEndsAsAMessageArrives(t *testing.T) {
	t.Parallel()
	for name, pause := range map[string]time.Duration{"is stored": time.Second, "is being stored": 50 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				y := newYard(t)
				var mended atomic.Bool
				y.fail = func(*inbox.Message) error {
					if mended.Load() {
						return nil
					}
					return inbox.Unrecoverable(errBroken)
				}
				y.parking = slowAnswers{slowStores{y.parking}, sync.OnceFunc(func() {
					y.put("a", 2)
					time.AfterFunc(pause+10*time.Millisecond, func() { y.put("a", 3) })
					time.Sleep(pause)
				})}
				run(t, y.consumer(func(*engine.Config) {}, memqueue.Options{}))
				y.put("a", 1)
				time.Sleep(time.Second)
				mended.Store(true)
				y.replay(inbox.Filter{})
				time.Sleep(time.Minute)
				if got := y.orderOf("a"); !slices.Equal(got, []int{1, 2, 3}) || len(y.parked()) != 0 {
					t.Errorf("done %v, parked %v", got, y.parked())
				}
			})
		})
	}
}

// slowStores is a Parking that takes its time.
type slowStores struct{ driver.Parking }

func (s slowStores) Append(ctx context.Context, key string, m *inbox.Message) error {
	time.Sleep(200 * time.Millisecond) // timing: in a bubble
	return s.Parking.Append(ctx, key, m)
}

// flaky is a Parking whose calls fail now and then, before or after they took effect.
type flaky struct {
	driver.Parking
	rate *atomic.Int32 // per mille
}

var errFlaky = errors.New("flaky")

func (f flaky) do(call func() error) error {
	n := rand.Int32N(2000)
	time.Sleep(rand.N(30 * time.Millisecond))
	defer func() { time.Sleep(rand.N(30 * time.Millisecond)) }()
	if n < f.rate.Load() {
		return errFlaky
	}
	err := call()
	if n >= 2000-f.rate.Load() {
		return errFlaky
	}
	return err
}

func (f flaky) Stop(ctx context.Context, key string, dead inbox.DeadLetter) error {
	return f.do(func() error { return f.Parking.Stop(ctx, key, dead) })
}

func (f flaky) Append(ctx context.Context, key string, m *inbox.Message) error {
	return f.do(func() error { return f.Parking.Append(ctx, key, m) })
}

func (f flaky) Heads(ctx context.Context, after string, most int) (heads []driver.Head, err error) {
	err = f.do(func() error {
		heads, err = f.Parking.Heads(ctx, after, most)
		return err
	})
	return heads, err
}

func (f flaky) Claim(ctx context.Context, key string, l driver.Lease) (m *inbox.Message, there bool, err error) {
	err = f.do(func() error {
		m, there, err = f.Parking.Claim(ctx, key, l)
		return err
	})
	return m, there, err
}

func (f flaky) Renew(ctx context.Context, l driver.Lease, messages []uuid.UUID) (kept []uuid.UUID, err error) {
	err = f.do(func() error {
		kept, err = f.Parking.Renew(ctx, l, messages)
		return err
	})
	return kept, err
}

func (f flaky) Fail(ctx context.Context, owner uuid.UUID, dead inbox.DeadLetter) error {
	return f.do(func() error { return f.Parking.Fail(ctx, owner, dead) })
}

func (f flaky) Done(ctx context.Context, owner uuid.UUID, m *inbox.Message) error {
	return f.do(func() error { return f.Parking.Done(ctx, owner, m) })
}

// watched is a Parking that sees to it that one claimed message of a key runs at a time.
type watched struct {
	driver.Parking
	t *testing.T

	mu      sync.Mutex
	claimed map[*inbox.Message]bool
	runs    map[string]bool // by key
	n       int
}

func (w *watched) Claim(ctx context.Context, key string, l driver.Lease) (*inbox.Message, bool, error) {
	m, there, err := w.Parking.Claim(ctx, key, l)
	w.mu.Lock()
	defer w.mu.Unlock()
	if m != nil {
		w.claimed[m] = true
	}
	return m, there, err
}

// begin notes that a handler runs, until the returned function is called.
func (w *watched) begin(m *inbox.Message) (end func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.claimed[m] {
		return func() {}
	}
	if w.runs[m.Key] {
		w.t.Errorf("two parked messages of key %s run at once", m.Key)
	}
	w.runs[m.Key] = true
	w.n++
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.runs[m.Key] = false
	}
}

// Keys are parked and resumed while processes come and go, sessions are lost, calls fail before or
// after they took effect, and operators replay and remove: every message takes effect once or is
// removed, and no key is out of order.
func TestParkedKeysThroughFaults(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 8} {
		t.Run(fmt.Sprint("batch ", batch), func(t *testing.T) {
			bubble(t, func(t *testing.T) { parkedKeysThroughFaults(t, batch) })
		})
	}
}

func parkedKeysThroughFaults(t *testing.T, batch int) {
	t.Helper()
	const keys, each, processes = 12, 60, 3
	y := newYard(t)
	var rate atomic.Int32
	rate.Store(60)
	watch := &watched{Parking: flaky{y.parking, &rate}, t: t, claimed: map[*inbox.Message]bool{}, runs: map[string]bool{}}
	y.parking = watch
	y.fail = func(m *inbox.Message) error {
		defer watch.begin(m)()
		if rand.N(200) == 0 {
			time.Sleep(45 * time.Second)
		}
		time.Sleep(rand.N(20 * time.Millisecond))
		switch n := rand.Int32N(1000); {
		case n < rate.Load():
			return inbox.Unrecoverable(errBroken)
		case n < 2*rate.Load():
			return errBroken
		}
		return nil
	}
	fault := func(memqueue.Step, *inbox.Message) memqueue.Outcome {
		if rand.Int32N(3000) < rate.Load() {
			return []memqueue.Outcome{memqueue.FailBefore, memqueue.FailAfter, memqueue.EndSession}[rand.N(3)]
		}
		return memqueue.OK
	}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for range processes {
		all.Go(func() {
			for ctx.Err() == nil { // each lives for some seconds
				c := y.consumer(func(cfg *engine.Config) {
					cfg.Concurrency, cfg.Batch, cfg.Prefetch, cfg.MaxParked = 4, batch, 50, 20+rand.IntN(200)
					cfg.TimeLimit = 3*time.Second + rand.N(20*time.Second)
					cfg.Retry = inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 50 * time.Millisecond, MaxDelay: 200 * time.Millisecond}
				}, memqueue.Options{Fault: fault})
				if err := c.Run(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Go(func() {
		for ctx.Err() == nil {
			time.Sleep(rand.N(3 * time.Second))
			y.operate()
		}
	})
	for n := range each {
		for k := range keys {
			y.put(fmt.Sprint("k", k), n)
		}
		time.Sleep(rand.N(200 * time.Millisecond))
	}
	time.Sleep(time.Minute)
	rate.Store(0)
	y.idle()
	eventually(t, "all keys are free", func() bool {
		y.replay(inbox.Filter{})
		return len(y.parked()) == 0 && y.count() == 0
	})
	y.idle()
	cancel()
	all.Wait()
	for k := range keys {
		if got := y.orderOf(fmt.Sprint("k", k)); !slices.IsSorted(got) {
			t.Errorf("key %d out of order: %v", k, got)
		}
	}
	for id, n := range y.number {
		if !y.done[id] && !y.removed[id] {
			t.Errorf("message %d is lost", n)
		}
	}
	if watch.n == 0 {
		t.Error("no parked message has run")
	}
	t.Logf("%d of %d messages were removed, %d runs of parked ones", len(y.removed), len(y.number), watch.n)
}

// operate replays what is dead, or removes one letter.
func (y *yard) operate() {
	if rand.N(4) > 0 {
		_, _ = y.letters().Replay(context.Background(), inbox.Filter{Limit: rand.N(10)}, inbox.Replay{By: "test"})
		return
	}
	found, err := y.letters().List(context.Background(), inbox.Filter{Limit: 1})
	if err != nil || len(found) == 0 {
		return
	}
	id := found[0].Message.ID
	y.mu.Lock()
	if !y.done[id] { // its removal may be resurrected by a redelivery: it has no place in the order any more
		y.removed[id] = true
	}
	y.mu.Unlock()
	_, _ = y.letters().Remove(context.Background(), inbox.Filter{IDs: []uuid.UUID{id}}, inbox.Removal{By: "test"})
}
