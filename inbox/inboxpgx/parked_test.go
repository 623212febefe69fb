package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

var errCrashed = errors.New("crashed")

// mortal is a process that dies after one of its steps, whose outcome it does not learn: nothing that
// it does later takes effect. To die before the next step leaves the same behind.
type mortal struct {
	at, steps atomic.Int64 // the step at which it dies, and how many it has taken
	dead      atomic.Bool
}

// step takes a step whose effect is call.
func (p *mortal) step(call func() error) error {
	if p.dead.Load() {
		return errCrashed
	}
	if p.steps.Add(1) != p.at.Load() {
		return call()
	}
	p.dead.Store(true)
	_ = call()
	return errCrashed
}

// fault has the queue take part. An acknowledgement is a step.
func (p *mortal) fault(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
	switch {
	case p.dead.Load():
		return inboxtest.FailBefore
	case at != inboxtest.AtAck || p.steps.Add(1) != p.at.Load():
		return inboxtest.OK
	}
	p.dead.Store(true)
	return inboxtest.FailAfter
}

// mortalStore is a Store in such a process.
type mortalStore struct {
	*inboxpgx.Store
	process *mortal
}

func (s mortalStore) Parking(used bool) driver.Parking {
	return mortalParking{s.Store.Parking(used), s.process}
}

// Process implements inbox.Processor: the handler's transaction is a step.
func (s mortalStore) Process(ctx context.Context, msgs []*inbox.Message) (results []error) {
	if err := s.process.step(func() error {
		results = s.Store.Process(ctx, msgs)
		return nil
	}); err != nil {
		return slices.Repeat([]error{inbox.Unavailable(err)}, len(msgs))
	}
	return results
}

// mortalParking is a Parking whose calls are steps, but for looking at all keys.
type mortalParking struct {
	driver.Parking
	process *mortal
}

func (p mortalParking) Heads(ctx context.Context, after string, most int) ([]driver.Head, error) {
	if p.process.dead.Load() {
		return nil, errCrashed
	}
	return p.Parking.Heads(ctx, after, most)
}

func (p mortalParking) Stop(ctx context.Context, key string, dead inbox.DeadLetter) error {
	return p.process.step(func() error { return p.Parking.Stop(ctx, key, dead) })
}

func (p mortalParking) Append(ctx context.Context, key string, m *inbox.Message) error {
	return p.process.step(func() error { return p.Parking.Append(ctx, key, m) })
}

func (p mortalParking) Claim(ctx context.Context, key string, l driver.Lease) (m *inbox.Message, there bool, err error) {
	err = p.process.step(func() error {
		// What is on its way when the process dies takes effect.
		m, there, err = p.Parking.Claim(context.WithoutCancel(ctx), key, l)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return m, there, nil
}

func (p mortalParking) Fail(ctx context.Context, owner uuid.UUID, dead inbox.DeadLetter) error {
	return p.process.step(func() error { return p.Parking.Fail(ctx, owner, dead) })
}

func (p mortalParking) Done(ctx context.Context, owner uuid.UUID, m *inbox.Message) error {
	return p.process.step(func() error { return p.Parking.Done(ctx, owner, m) })
}

// Renew implements driver.Parking. It is no step: when it is called depends on the time.
func (p mortalParking) Renew(ctx context.Context, l driver.Lease, messages []uuid.UUID) ([]uuid.UUID, error) {
	if p.process.dead.Load() {
		return nil, errCrashed
	}
	return p.Parking.Renew(ctx, l, messages)
}

// siding is a queue of one key and a Store in memory, in a bubble. The first message fails until it is repaired.
type siding struct {
	t        *testing.T
	manager  *txretrytest.Manager
	entries  *memory.Entries
	broker   *inboxtest.Broker
	repaired atomic.Bool

	mu   sync.Mutex
	done []int // the numbers, in the order of their commits
	sent int
}

// start runs a process until it dies or the returned function is called.
func (s *siding) start(process *mortal) (letters inbox.DeadLetters, stop func()) {
	s.t.Helper()
	store := newStore(s.t, s.manager, "a", inboxpgx.Config{Entries: s.entries})
	handle(s.t, store, func(_ context.Context, tx pgx.Tx, e conformance.Event) error {
		if e.Number == 1 && !s.repaired.Load() {
			return inbox.Unrecoverable(errors.New("no"))
		}
		txretry.AfterCommit(tx, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if e.Number > 0 {
				s.done = append(s.done, e.Number)
			}
		})
		return nil
	})
	consumer, err := inboxtest.NewConsumer(s.broker, "orders", mortalStore{store, process}, inboxtest.Config{
		ConsumerConfig: inbox.ConsumerConfig{Ordered: true, ParkKeys: true, ShutdownTimeout: 10 * time.Second},
		Fault:          process.fault,
	})
	noError(s.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := consumer.Run(ctx); err != nil {
			s.t.Error(err)
		}
	})
	running.Go(func() { // a dead process does not drain
		for ctx.Err() == nil && !process.dead.Load() {
			time.Sleep(5 * time.Millisecond)
		}
		cancel()
	})
	return consumer.DeadLetters(), func() {
		cancel()
		running.Wait()
	}
}

func (s *siding) put(key string, numbers ...int) {
	s.t.Helper()
	for _, n := range numbers {
		s.sent++
		id := ids.Deterministic(time.Now(), fmt.Sprint(s.sent))
		noError(s.t, s.broker.Send(s.t.Context(), &inbox.Message{ID: id, Name: conformance.Name, Key: key, Body: fmt.Appendf(nil, `{"number":%d}`, n)}))
	}
}

// await waits for an hour of the bubble at most.
func (s *siding) await(want string, holds func() bool) {
	s.t.Helper()
	for began := time.Now(); !holds(); time.Sleep(100 * time.Millisecond) {
		if time.Since(began) > time.Hour {
			s.t.Fatalf("not within an hour: %s", want)
		}
	}
}

func (s *siding) effects() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.done)
}

func (s *siding) parked() int {
	n, err := newStore(s.t, s.manager, "a", inboxpgx.Config{Entries: s.entries}).Parking(true).Count(s.t.Context(), 100)
	if err != nil {
		s.t.Error(err)
	}
	return n
}

// The process may die between any two steps of parking and resuming a key: each message takes effect
// once, in the order of the key.
func TestParkedKeyThroughCrashes(t *testing.T) {
	t.Parallel()
	for step := range int64(28) {
		t.Run(fmt.Sprint("step ", step), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				process := &mortal{}
				process.at.Store(step + 1)
				parkedKeyThroughCrash(t, process)
			})
		})
	}
}

func parkedKeyThroughCrash(t *testing.T, process *mortal) {
	t.Helper()
	s := &siding{t: t, manager: txretrytest.New(txretrytest.Config{}), entries: memory.NewEntries(driver.DefaultRetention), broker: inboxtest.NewBroker()}
	letters, stop := s.start(process)
	revive := func() { // another process replaces a dead one
		if process.dead.Load() {
			stop()
			process = &mortal{}
			letters, stop = s.start(process)
			s.put("other", 0) // shows the new process that it is served
		}
	}
	defer func() { stop() }()
	s.put("k", 1, 2, 3)
	s.await("the key is parked", func() bool { revive(); return s.parked() == 3 })
	s.repaired.Store(true)
	s.await("the dead letter is replayed", func() bool {
		revive()
		done, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"})
		if err != nil && !process.dead.Load() { // by an earlier step, perhaps after the replay
			t.Error(err)
		}
		return done.Returned == 1
	})
	s.put("k", 4)
	s.await("all is done", func() bool { revive(); return len(s.effects()) >= 4 && s.parked() == 0 })
	s.put("k", 5)
	s.await("the key is free", func() bool { revive(); return len(s.effects()) >= 5 })
	if got := s.effects(); !slices.Equal(got, []int{1, 2, 3, 4, 5}) {
		t.Errorf("effects %v", got)
	}
	t.Logf("%d steps", process.steps.Load())
}

// Claims of parked messages are renewed while handlers hold every connection of the pool.
func TestParkingRenew_besideAFullPool(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	parking := newStore(t, newManager(t, pool), "a", inboxpgx.Config{}).Parking(true)
	m, lease := event(), driver.Lease{Owner: ids.New(), For: time.Minute}
	noError(t, parking.Append(t.Context(), "key", m))
	if _, _, err := parking.Claim(t.Context(), "key", lease); err != nil {
		t.Fatal(err)
	}
	for range pool.Config().MaxConns {
		conn, err := pool.Acquire(t.Context())
		noError(t, err)
		defer conn.Release()
	}
	if kept, err := parking.Renew(t.Context(), lease, []uuid.UUID{m.ID}); err != nil || len(kept) != 1 {
		t.Errorf("%d claims kept, error %v", len(kept), err)
	}
}
