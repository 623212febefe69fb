package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	pgdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// mortal is a process that dies after one of its steps, whose outcome it does not learn: nothing that
// it does later takes effect. To die before the next step leaves the same behind.
type mortal struct {
	at, steps atomic.Int64 // the step at which it dies, and how many it has taken
	rate      atomic.Int32 // per mille of the steps that fail, before or after they took effect
	dead      atomic.Bool
	sends     bool // on Postgres: the packet at which it dies is sent
}

var errCrashed = errors.New("crashed")

// step takes a step whose effect is call.
func (p *mortal) step(call func() error) error {
	if p.dead.Load() {
		return errCrashed
	}
	n, rate := rand.Int32N(2000), p.rate.Load()
	if n < rate {
		return errCrashed
	}
	if rate > 0 {
		time.Sleep(rand.N(30 * time.Millisecond))
	}
	if p.steps.Add(1) != p.at.Load() {
		err := call()
		if n >= 2000-rate {
			return errCrashed
		}
		return err
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
	case p.rate.Load() > 0 && rand.Int32N(3000) < p.rate.Load():
		return []inboxtest.Outcome{inboxtest.FailBefore, inboxtest.FailAfter, inboxtest.EndSession}[rand.N(3)]
	case at != inboxtest.AtAck || p.steps.Add(1) != p.at.Load():
		return inboxtest.OK
	}
	p.dead.Store(true)
	return inboxtest.FailAfter
}

// mortalManager has each transaction be a step.
type mortalManager struct {
	txretry.Transactor
	process *mortal
}

func (m mortalManager) DoWith(ctx context.Context, opts txretry.Options, fn func(context.Context, pgx.Tx) error) (err error) {
	ended := m.process.step(func() error {
		err = m.Transactor.DoWith(ctx, opts, fn)
		return nil
	})
	if ended != nil {
		return inbox.Unavailable(ended)
	}
	return err
}

// mortalEntries has each call of its Parking be a step, but for reads.
type mortalEntries struct {
	pgdriver.Entries
	process *mortal
}

func (e mortalEntries) Parking(consumer string) pgdriver.Parking {
	return mortalParking{e.Entries.Parking(consumer), e.process}
}

type mortalParking struct {
	pgdriver.Parking
	process *mortal
}

func (p mortalParking) Stop(ctx context.Context, key string, dead inbox.DeadLetter) error {
	return p.process.step(func() error { return p.Parking.Stop(ctx, key, dead) })
}

func (p mortalParking) Wait(ctx context.Context, key string, m *inbox.Message) (waits bool, err error) {
	return waits, p.process.step(func() error {
		waits, err = p.Parking.Wait(ctx, key, m)
		return err
	})
}

// Claim implements driver.Parking. One that finds nothing is no step: how many there are depends on the time.
func (p mortalParking) Claim(ctx context.Context, lease time.Duration) (*pgdriver.Head, error) {
	if p.process.dead.Load() {
		return nil, errCrashed
	}
	h, err := p.Parking.Claim(ctx, lease)
	if h == nil || err != nil {
		return nil, err
	}
	return h, p.process.step(func() error { return nil })
}

func (p mortalParking) Next(ctx context.Context, h *pgdriver.Head, lease time.Duration) (next *pgdriver.Head, err error) {
	err = p.process.step(func() error {
		next, err = p.Parking.Next(ctx, h, lease)
		return err
	})
	if err != nil {
		return nil, err
	}
	return next, nil
}

func (p mortalParking) Retry(ctx context.Context, h *pgdriver.Head, next *inbox.Message, delay time.Duration) error {
	return p.process.step(func() error { return p.Parking.Retry(ctx, h, next, delay) })
}

func (p mortalParking) Fail(ctx context.Context, h *pgdriver.Head, dead inbox.DeadLetter) error {
	return p.process.step(func() error { return p.Parking.Fail(ctx, h, dead) })
}

func (p mortalParking) Release(ctx context.Context, h *pgdriver.Head) error {
	return p.process.step(func() error { return p.Parking.Release(ctx, h) })
}

func (y *yard) liveInMemory(ctx context.Context, p *mortal, change func(*inboxtest.Config)) {
	y.liveWith(ctx, p, newStore(y.t, mortalManager{y.manager, p}, "a", inboxpgx.Config{Entries: mortalEntries{y.entries, p}}), change)
}

// liveWith runs a process until it dies or ctx ends.
func (y *yard) liveWith(ctx context.Context, p *mortal, s *inboxpgx.Store, change func(*inboxtest.Config)) {
	handle(y.t, s, y.handle)
	c := y.consumer(s, func(cfg *inboxtest.Config) {
		cfg.Fault, cfg.ShutdownTimeout = p.fault, 10*time.Second
		change(cfg)
	})
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		defer cancel()
		if err := c.Run(ctx); err != nil {
			y.t.Error(err)
		}
	})
	for ctx.Err() == nil && !p.dead.Load() {
		time.Sleep(5 * time.Millisecond)
	}
	cancel() // a dead process does not drain
	running.Wait()
}

// The process may die between any two steps of parking and resuming a key: each message takes effect
// once, in the order of the key.
func TestParkedKey_throughCrashes(t *testing.T) {
	t.Parallel()
	for step := range int64(36) {
		t.Run(fmt.Sprint("step ", step), func(t *testing.T) {
			inYard(t, func(t *testing.T, y *yard) {
				p := &mortal{}
				p.at.Store(step + 1)
				y.parkedKeyThroughCrash(p)
			})
		})
	}
}

func (y *yard) parkedKeyThroughCrash(first *mortal) {
	y.t.Helper()
	mended := y.failsUntil("k", 1)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		for p := first; ctx.Err() == nil; p = new(mortal) {
			y.live(ctx, p, func(*inboxtest.Config) {})
		}
	})
	defer running.Wait()
	defer cancel()
	await := func(what string, holds func() bool) {
		y.t.Helper()
		for began := time.Now(); !holds(); time.Sleep(100 * time.Millisecond) {
			if time.Since(began) > time.Hour {
				y.t.Fatalf("not within an hour: %s", what)
			}
		}
	}
	y.put("k", 1, 2, 3)
	await("three messages wait", func() bool { _, n := y.waiting(); return n == 3 })
	mended.Store(true)
	await("the letter is replayed", func() bool { return y.replay(inbox.Filter{}) == 1 })
	y.put("k", 4)
	await("all is done", func() bool { return len(y.orderOf("k")) == 4 })
	y.put("k", 5)
	await("the key is free", func() bool { return len(y.orderOf("k")) == 5 })
	await("nothing is left", func() bool { keys, n := y.waiting(); return keys+n == 0 })
	y.wantOrder("k", 1, 2, 3, 4, 5)
	y.t.Logf("%d steps", first.steps.Load())
}

// Keys are parked and resumed while processes come and go, sessions are lost, calls fail before or
// after they took effect, and operators replay and remove: every message takes effect once or is
// removed, and no key is out of order.
func TestParkedKeys_throughFaults(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 8} {
		t.Run(fmt.Sprint("batch ", batch), func(t *testing.T) {
			inYard(t, func(t *testing.T, y *yard) { y.throughFaults(batch, 12, 60) })
		})
	}
}

func (y *yard) throughFaults(batch, keys, each int) {
	const processes = 3
	t := y.t
	var rate atomic.Int32
	rate.Store(60)
	y.fail = func(context.Context, *inbox.Message) error {
		time.Sleep(rand.N(2 * time.Millisecond)) // one transaction runs at a time
		switch n := rand.Int32N(1000); {
		case n < rate.Load():
			return inbox.Unrecoverable(errBroken)
		case n < 2*rate.Load():
			return errBroken
		}
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for range processes {
		all.Go(func() {
			for ctx.Err() == nil { // each lives for some seconds, and some die
				p := &mortal{}
				p.rate.Store(rate.Load())
				if rand.N(2) == 0 && rate.Load() > 0 {
					p.at.Store(rand.Int64N(300))
				}
				y.live(ctx, p, func(cfg *inboxtest.Config) {
					cfg.Concurrency, cfg.Batch, cfg.Prefetch, cfg.MaxParked = 4, batch, 50, 20+rand.IntN(200)
					cfg.TimeLimit = 3*time.Second + rand.N(20*time.Second)
				})
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
	if y.pool == nil {
		time.Sleep(time.Minute)
	}
	rate.Store(0)
	y.idle()
	for began := time.Now(); ; time.Sleep(time.Second) {
		y.replay(inbox.Filter{})
		keys, messages := y.waiting()
		if keys+messages+y.count() == 0 {
			break
		}
		if time.Since(began) > time.Hour {
			t.Fatalf("%d keys, %d messages, %d letters are left", keys, messages, y.count())
		}
	}
	y.idle()
	cancel()
	all.Wait()
	y.load()
	for k := range keys {
		if got := y.order[fmt.Sprint("k", k)]; !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != len(got) {
			t.Errorf("key %d out of order, or twice: %v", k, got)
		}
	}
	for id, n := range y.number {
		if !y.done[id] && !y.removed[id] {
			t.Errorf("message %d is lost", n)
		}
	}
	t.Logf("%d of %d messages were removed", len(y.removed), len(y.number))
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
	y.load()
	y.mu.Lock()
	if !y.done[id] { // a redelivery may bring it back: it has no place in the order any more
		y.removed[id] = true
	}
	y.mu.Unlock()
	_, _ = y.letters().Remove(context.Background(), inbox.Filter{IDs: []uuid.UUID{id}}, inbox.Removal{By: "test"})
}
