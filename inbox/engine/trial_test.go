package engine_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// More messages than are kept on trial lack a server that others do not need: those that make room go
// behind the others, for the queue would hand them out first again.
func TestManyMessagesLackTheirServer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const lacking, others = 600, 20
		var passed atomic.Int32
		p := processorFunc(func(_ context.Context, m *inbox.Message) error {
			if m.Name == "lacking" {
				return inbox.Unavailable(errBroken)
			}
			passed.Add(1)
			return nil
		})
		b := newBench(t, p, engine.Config{}, memqueue.Options{Split: true})
		b.put("lacking", lacking)
		b.put("other", others)
		b.start()
		for end := time.Now().Add(10 * time.Minute); passed.Load() < others && time.Now().Before(end); {
			time.Sleep(time.Second)
		}
		if n := passed.Load(); n != others {
			t.Errorf("%d of %d other messages went through", n, others)
		}
	})
}

// Messages that have failed by themselves fill the head of the queue when an outage ends: the probes
// pass them by, and the pause ends soon after the outage.
func TestProbesPassByWhatFailsByItself(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const bad, good = 200, 50
		var down atomic.Bool
		var passed atomic.Int32
		p := processorFunc(func(_ context.Context, m *inbox.Message) error {
			if m.Name == "bad" || down.Load() {
				return inbox.Unavailable(errBroken)
			}
			passed.Add(1)
			return nil
		})
		retry := inbox.RetryPolicy{MaxAttempts: 1000, BaseDelay: time.Second, MaxDelay: 2 * time.Second}
		b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Retry: retry}}, memqueue.Options{})
		b.put("bad", bad)
		b.start()
		for range 100 { // each bad one fails while others go through
			b.put("good", 10)
			time.Sleep(100 * time.Millisecond)
		}
		eventually(t, "the good ones pass", func() bool { return passed.Load() == 1000 })
		down.Store(true)
		b.put("good", 20)
		time.Sleep(10 * time.Second) // the bad ones are due again, and in the queue
		b.put("good", good)
		down.Store(false)
		began := time.Now()
		eventually(t, "the good ones pass after the outage", func() bool { return passed.Load() == 1000+20+good })
		if took := time.Since(began); took > 6*time.Second {
			t.Errorf("%v after the outage", took)
		}
		b.stop()
	})
}

// Handlers take longer than a message that lacks its server waits for another one: one that has begun is
// awaited, so that a stream of such messages does not pause the consumer.
func TestSlowHandlersTellWhatIsDown(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const good, takes = 200, 2 * time.Second
		var passed atomic.Int32
		p := processorFunc(func(_ context.Context, m *inbox.Message) error {
			if m.Name == "bad" {
				return inbox.Unavailable(errBroken)
			}
			time.Sleep(takes)
			passed.Add(1)
			return nil
		})
		retry := inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: time.Second, MaxDelay: 2 * time.Second}
		b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 8, Retry: retry}}, memqueue.Options{})
		for range good / 20 {
			b.put("bad", 1)
			b.put("good", 20)
		}
		began := time.Now()
		b.start()
		eventually(t, "the good ones pass", func() bool { return passed.Load() == good })
		if took, alone := time.Since(began), good/8*takes; took > alone*11/10 {
			t.Errorf("%v, and %v without the bad ones", took, alone)
		}
		b.stop()
	})
}

// The queue is silent for a second where every second message lacks a server that the others do not need.
// That is no outage, and what comes next does not wait.
func TestSilentQueueIsNoOutage(t *testing.T) {
	for _, concurrency := range []int{1, 8} {
		t.Run(fmt.Sprint(concurrency), func(t *testing.T) { bubble(t, func(t *testing.T) { silences(t, concurrency) }) })
	}
}

func silences(t *testing.T, concurrency int) {
	var sent, passed atomic.Int32
	p := processorFunc(func(_ context.Context, m *inbox.Message) error {
		if m.Name == "bad" {
			return inbox.Unavailable(errBroken)
		}
		passed.Add(1)
		return nil
	})
	retry := inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: time.Second, MaxDelay: 2 * time.Second}
	b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: concurrency, Prefetch: 16, Retry: retry}}, memqueue.Options{})
	b.start()
	mixed := func() {
		b.put("bad", 1)
		b.put("good", 1)
		sent.Add(1)
	}
	for round := range 20 {
		for range 100 {
			mixed()
			time.Sleep(10 * time.Millisecond)
		}
		b.put("bad", 1)
		time.Sleep(time.Second)
		b.put("bad", 1)
		time.Sleep(150 * time.Millisecond)
		for range 10 {
			mixed()
		}
		began := time.Now()
		eventually(t, "the good ones pass", func() bool { return passed.Load() == sent.Load() })
		if took := time.Since(began); took > 50*time.Millisecond {
			t.Errorf("round %d: %v after a silence", round, took)
		}
	}
	b.stop()
}

// A server is down that everything needs, and few messages come: they show it, and the last one is
// processed soon after the server is back.
func TestOutageOfFewMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var down atomic.Bool
		var passed atomic.Int32
		p := processorFunc(func(context.Context, *inbox.Message) error {
			if down.Load() {
				return inbox.Unavailable(errBroken)
			}
			passed.Add(1)
			return nil
		})
		b := newBench(t, p, engine.Config{}, memqueue.Options{})
		b.start()
		down.Store(true)
		b.put("few", 2)
		time.Sleep(time.Second)
		if err := b.consumer.Ready(t.Context()); err != nil {
			t.Errorf("Ready = %v before anything shows an outage", err)
		}
		time.Sleep(time.Second)
		if err := b.consumer.Ready(t.Context()); err == nil {
			t.Error("Ready in an outage")
		}
		time.Sleep(time.Minute)
		down.Store(false)
		began := time.Now()
		eventually(t, "both pass", func() bool { return passed.Load() == 2 })
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("%v after the outage", took)
		}
		b.stop()
	})
}

// A message fails once for want of a server, and nothing else is there to tell: it is tried again soon,
// without a pause.
func TestMomentOnQuietQueue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var calls atomic.Int32
		p := processorFunc(func(context.Context, *inbox.Message) error {
			if calls.Add(1) == 1 {
				return inbox.Unavailable(errBroken)
			}
			return nil
		})
		b := newBench(t, p, engine.Config{}, memqueue.Options{})
		b.start()
		b.put("one", 1)
		began := time.Now()
		for calls.Load() < 2 && time.Since(began) < time.Minute {
			if err := b.consumer.Ready(t.Context()); err != nil && calls.Load() == 1 {
				t.Fatalf("Ready = %v after %v", err, time.Since(began))
			}
			time.Sleep(10 * time.Millisecond)
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("tried again after %v", took)
		}
		b.stop()
	})
}

// A server is down whose absence is noticed slowly: fewer messages than make an outage fail before
// others have begun, again and again. It is one all the same.
func TestOutageThatIsNoticedSlowly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		p := processorFunc(func(context.Context, *inbox.Message) error {
			time.Sleep(6 * time.Second)
			return inbox.Unavailable(errBroken)
		})
		b := newBench(t, p, engine.Config{}, memqueue.Options{})
		b.put("slow", 100)
		b.start()
		paused := false
		for range 300 {
			time.Sleep(100 * time.Millisecond)
			err := b.consumer.Ready(t.Context())
			paused = paused || err != nil && strings.Contains(err.Error(), "paused")
		}
		if !paused {
			t.Error("no pause within 30 s")
		}
		b.stop()
	})
}

// A message that fails by itself is tried again after a silence, and another one comes just then: it goes
// through at once, and there is no pause.
func TestMessageThatComesInDoubt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var bad, good atomic.Int32
		p := processorFunc(func(_ context.Context, m *inbox.Message) error {
			if m.Name == "bad" {
				bad.Add(1)
				return inbox.Unavailable(errBroken)
			}
			good.Add(1)
			return nil
		})
		b := newBench(t, p, engine.Config{}, memqueue.Options{})
		b.start()
		b.put("bad", 1)
		for began := time.Now(); bad.Load() < 2 && time.Since(began) < time.Minute; {
			time.Sleep(10 * time.Millisecond)
		}
		b.put("good", 1)
		time.Sleep(10 * time.Millisecond)
		if good.Load() != 1 {
			t.Error("the other one waits")
		}
		if err := b.consumer.Ready(t.Context()); err != nil {
			t.Errorf("Ready = %v", err)
		}
		b.stop()
	})
}

// A consumer of one message at a time has others ready when one ends: there is no doubt before they have
// been tried.
func TestReadyMessagesAreTriedBeforeADoubt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const good, takes = 10, 2 * time.Second
		var passed atomic.Int32
		p := processorFunc(func(_ context.Context, m *inbox.Message) error {
			time.Sleep(takes)
			if m.Name == "bad" {
				return inbox.Unavailable(errBroken)
			}
			passed.Add(1)
			return nil
		})
		b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 1, Prefetch: 16}}, memqueue.Options{})
		for range good {
			b.put("bad", 2)
			b.put("good", 1)
		}
		began := time.Now()
		b.start()
		eventually(t, "the good ones pass", func() bool { return passed.Load() == good })
		if took := time.Since(began); took > 3*good*takes+time.Second {
			t.Errorf("%v, and each message takes %v", took, takes)
		}
		b.stop()
	})
}
