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

// traffic is a bench whose messages named bad always lack a server, and the others only during an outage.
type traffic struct {
	*bench
	takes             time.Duration // of a handler that does not fail
	down              atomic.Bool
	bad, good         atomic.Int32 // handlers that failed, and that went through
	running, together atomic.Int32 // of the good ones: now, and at most
}

func newTraffic(t *testing.T, takes time.Duration, cfg inbox.ConsumerConfig, o memqueue.Options) *traffic {
	t.Helper()
	f := &traffic{takes: takes}
	f.bench = newBench(t, f, engine.Config{ConsumerConfig: cfg}, o)
	return f
}

func (f *traffic) Process(_ context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		if m.Name == "bad" || f.down.Load() {
			f.bad.Add(1)
			results[i] = inbox.Unavailable(errBroken)
			continue
		}
		f.together.Store(max(f.together.Load(), f.running.Add(1)))
		time.Sleep(f.takes)
		f.running.Add(-1)
		f.good.Add(1)
	}
	return results
}

// pass waits until so many good messages went through since the start, and returns how long that took.
func (f *traffic) pass(want int) time.Duration {
	f.t.Helper()
	began := time.Now()
	eventually(f.t, "the good ones pass", func() bool { return f.good.Load() == int32(want) })
	return time.Since(began)
}

// ready fails the test if the consumer is not ready.
func (f *traffic) ready() {
	f.t.Helper()
	if err := ready(f.bench); err != nil {
		f.t.Errorf("Ready = %v", err)
	}
}

func retries(attempts int) inbox.RetryPolicy {
	return inbox.RetryPolicy{MaxAttempts: attempts, BaseDelay: time.Second, MaxDelay: 2 * time.Second}
}

// More messages than are kept on trial lack a server that others do not need: those that make room go
// behind the others, for the queue would hand them out first again.
func TestManyMessagesLackTheirServer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newTraffic(t, 0, inbox.ConsumerConfig{}, memqueue.Options{Split: true})
		f.put("bad", 600)
		f.put("good", 20)
		f.start()
		if took := f.pass(20); took > 10*time.Minute {
			t.Errorf("the other messages took %v", took)
		}
	})
}

// Messages that have failed by themselves fill the head of the queue when an outage ends: the probes
// pass them by, and the pause ends soon after the outage.
func TestProbesPassByWhatFailsByItself(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newTraffic(t, 0, inbox.ConsumerConfig{Retry: retries(1000)}, memqueue.Options{})
		f.put("bad", 200)
		f.start()
		for range 100 { // each bad one fails while others go through
			f.put("good", 10)
			time.Sleep(100 * time.Millisecond)
		}
		f.pass(1000)
		f.down.Store(true)
		f.put("good", 20)
		time.Sleep(10 * time.Second) // the bad ones are due again, and in the queue
		f.put("good", 50)
		f.down.Store(false)
		if took := f.pass(1000 + 20 + 50); took > 6*time.Second {
			t.Errorf("%v after the outage", took)
		}
		f.stop()
	})
}

// Handlers take longer than a message that lacks its server waits for another one: one that has begun is
// awaited, so that a stream of such messages does not pause the consumer.
func TestSlowHandlersTellWhatIsDown(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const good, takes = 200, 2 * time.Second
		f := newTraffic(t, takes, inbox.ConsumerConfig{Concurrency: 8, Retry: retries(3)}, memqueue.Options{})
		for range good / 20 {
			f.put("bad", 1)
			f.put("good", 20)
		}
		f.start()
		if took, alone := f.pass(good), good/8*takes; took > alone*11/10 {
			t.Errorf("%v, and %v without the bad ones", took, alone)
		}
		f.stop()
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
	f := newTraffic(t, 0, inbox.ConsumerConfig{Concurrency: concurrency, Prefetch: 16, Retry: retries(3)}, memqueue.Options{})
	f.start()
	sent := 0
	mixed := func() {
		f.put("bad", 1)
		f.put("good", 1)
		sent++
	}
	for round := range 20 {
		for range 100 {
			mixed()
			time.Sleep(10 * time.Millisecond)
		}
		f.put("bad", 1)
		time.Sleep(time.Second)
		f.put("bad", 1)
		time.Sleep(150 * time.Millisecond)
		for range 10 {
			mixed()
		}
		if took := f.pass(sent); took > 50*time.Millisecond {
			t.Errorf("round %d: %v after a silence", round, took)
		}
	}
	f.stop()
}

// A server is down that everything needs, and few messages come: they show it, and the last one is
// processed soon after the server is back.
func TestOutageOfFewMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newTraffic(t, 0, inbox.ConsumerConfig{}, memqueue.Options{})
		f.start()
		f.down.Store(true)
		f.put("few", 2)
		time.Sleep(time.Second)
		f.ready() // nothing shows an outage yet
		time.Sleep(time.Second)
		if ready(f.bench) == nil {
			t.Error("Ready in an outage")
		}
		time.Sleep(time.Minute)
		f.down.Store(false)
		if took := f.pass(2); took > 5*time.Second {
			t.Errorf("%v after the outage", took)
		}
		f.stop()
	})
}

// A message fails once because a server was unreachable, and nothing else is there to tell: it is tried again
// soon, without a pause.
func TestMomentOnQuietQueue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newTraffic(t, 0, inbox.ConsumerConfig{}, memqueue.Options{})
		f.down.Store(true)
		f.start()
		f.put("one", 1)
		began := time.Now()
		for f.good.Load() == 0 && time.Since(began) < time.Minute {
			time.Sleep(10 * time.Millisecond)
			f.down.Store(f.bad.Load() == 0)
			f.ready()
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("tried again after %v", took)
		}
		f.stop()
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
		began := time.Now()
		eventually(t, "there is a pause", func() bool { err := ready(b); return err != nil && strings.Contains(err.Error(), "paused") })
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("a pause after %v", took)
		}
		b.stop()
	})
}

// A message that fails by itself is tried again after a silence, and another one comes just then: it goes
// through at once, and there is no pause.
func TestMessageThatComesInDoubt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newTraffic(t, 0, inbox.ConsumerConfig{}, memqueue.Options{})
		f.start()
		f.put("bad", 1)
		for began := time.Now(); f.bad.Load() < 2 && time.Since(began) < time.Minute; {
			time.Sleep(10 * time.Millisecond)
		}
		f.put("good", 1)
		time.Sleep(10 * time.Millisecond)
		if f.good.Load() != 1 {
			t.Error("the other one waits")
		}
		f.ready()
		f.stop()
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
		f := newTraffic(t, 40*time.Second, inbox.ConsumerConfig{Concurrency: 8, HandlerTimeout: time.Minute}, memqueue.Options{})
		f.down.Store(true)
		f.put("good", 64)
		f.start()
		time.Sleep(100 * time.Millisecond)
		if f.running.Load() != 0 || ready(f.bench) == nil {
			t.Error("no pause")
		}
		f.down.Store(false)
		time.Sleep(10 * time.Second)
		if n := f.running.Load(); n != 8 {
			t.Errorf("%d handlers run 10 s after the outage", n)
		}
		f.pass(64)
		if n := f.together.Load(); n != 8 {
			t.Errorf("%d ran at once", n)
		}
		f.stop()
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
				f := newTraffic(t, takes, inbox.ConsumerConfig{Concurrency: 4, HandlerTimeout: time.Minute, Retry: retries(2)}, memqueue.Options{})
				f.start()
				f.put("bad", 1)
				time.Sleep(10 * time.Second)
				for range 40 {
					f.put("good", 1)
					time.Sleep(15 * time.Second)
				}
				f.pass(40)
				if n := len(f.letters("default")); n != 1 {
					t.Errorf("%d dead letters", n)
				}
				f.ready()
				f.stop()
			})
		})
	}
}
