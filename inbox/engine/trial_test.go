package engine_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
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

// slowBesideBad lacks a server for the bad messages, and takes its time for the others.
func slowBesideBad(takes time.Duration, passed *atomic.Int32) processorFunc {
	return func(_ context.Context, m *inbox.Message) error {
		if m.Name == "bad" {
			return inbox.Unavailable(errBroken)
		}
		time.Sleep(takes)
		passed.Add(1)
		return nil
	}
}

// Handlers take longer than a message that lacks its server waits for another one: one that has begun is
// awaited, so that a stream of such messages does not pause the consumer.
func TestSlowHandlersTellWhatIsDown(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const good, takes = 200, 2 * time.Second
		var passed atomic.Int32
		p := slowBesideBad(takes, &passed)
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

// A server is down for a moment, and handlers take long: the others do not wait until the first probe has ended.
func TestSlowHandlersAfterAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const good, takes = 64, 40 * time.Second
		var down atomic.Bool
		var running, most, passed atomic.Int32
		p := processorFunc(func(context.Context, *inbox.Message) error {
			if down.Load() {
				return inbox.Unavailable(errBroken)
			}
			most.Store(max(most.Load(), running.Add(1)))
			time.Sleep(takes)
			running.Add(-1)
			passed.Add(1)
			return nil
		})
		b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 8, HandlerTimeout: time.Minute}}, memqueue.Options{})
		down.Store(true)
		b.put("good", good)
		b.start()
		time.Sleep(100 * time.Millisecond)
		if running.Load() != 0 || b.consumer.Ready(t.Context()) == nil {
			t.Error("no pause")
		}
		down.Store(false)
		time.Sleep(10 * time.Second)
		if n := running.Load(); n != 8 {
			t.Errorf("%d handlers run 10 s after the outage", n)
		}
		eventually(t, "the good ones pass", func() bool { return passed.Load() == good })
		if n := most.Load(); n != 8 {
			t.Errorf("%d ran at once", n)
		}
		b.stop()
	})
}

// A server is down, and one of the handlers never returns: a probe waits for it until it is known to be stuck.
func TestProbeThatNeverEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const good = 20
		var down, deaf atomic.Bool
		var passed, calls atomic.Int32
		release := make(chan struct{})
		end := sync.OnceFunc(func() { close(release) })
		t.Cleanup(end) // also where the test fails
		p := processorFunc(func(context.Context, *inbox.Message) error {
			calls.Add(1)
			switch {
			case deaf.CompareAndSwap(true, false):
				<-release
			case down.Load():
				return inbox.Unavailable(errBroken)
			default:
				passed.Add(1)
			}
			return nil
		})
		b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4}}, memqueue.Options{})
		down.Store(true)
		b.put("good", good)
		b.start()
		eventually(t, "there is a pause", func() bool { return b.consumer.Ready(t.Context()) != nil && calls.Load() >= 16 })
		deaf.Store(true)
		eventually(t, "a probe is deaf", func() bool { return !deaf.Load() })
		before := calls.Load()
		time.Sleep(90 * time.Second)
		if n := calls.Load() - before; n > 4*90 || b.consumer.Ready(t.Context()) == nil {
			t.Errorf("%d calls in an outage of 90 s; Ready = %v", n, b.consumer.Ready(t.Context()))
		}
		down.Store(false)
		began := time.Now()
		eventually(t, "the good ones pass", func() bool { return passed.Load() == good-1 })
		if took := time.Since(began); took > 8*time.Second {
			t.Errorf("%v after the outage", took)
		}
		end()
		b.idle()
		b.stop()
	})
}

// One message always lacks its own server, and the good ones take long and are few: each that goes through
// ends the pause, and tells whose failure it was.
func TestSlowMessagesBesideOneThatFails(t *testing.T) {
	for _, takes := range []time.Duration{3 * time.Second, 40 * time.Second} {
		t.Run(takes.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var passed atomic.Int32
				p := slowBesideBad(takes, &passed)
				retry := inbox.RetryPolicy{MaxAttempts: 2, BaseDelay: time.Second, MaxDelay: 2 * time.Second}
				b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4, HandlerTimeout: time.Minute, Retry: retry}}, memqueue.Options{})
				b.start()
				b.put("bad", 1)
				time.Sleep(10 * time.Second)
				const good = 40
				for range good {
					b.put("good", 1)
					time.Sleep(15 * time.Second)
				}
				eventually(t, "the good ones pass", func() bool { return passed.Load() == good })
				if n := len(b.letters("default")); n != 1 {
					t.Errorf("%d dead letters", n)
				}
				if err := b.consumer.Ready(t.Context()); err != nil {
					t.Errorf("Ready = %v", err)
				}
				b.stop()
			})
		})
	}
}
