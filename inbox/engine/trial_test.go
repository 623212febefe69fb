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

// traffic is a bench. The server of messages named bad is always unreachable; for the others it is only in an
// outage.
type traffic struct {
	*bench
	takes             time.Duration // of a handler that does not fail
	down              atomic.Bool
	bad, good         atomic.Int32 // handlers that failed, and that succeeded
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

// pass waits until want good messages succeeded since the start, and returns the time that took.
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

// More suspects than the limit lack a server that the others do not need. The excess goes behind the others,
// because the queue would deliver it first again.
func TestSuspects_excessGoesBehindTheOthers(t *testing.T) {
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

// When an outage ends, messages that fail by themselves are at the head of the queue. The probes skip them,
// and the pause ends soon after the outage.
func TestPause_probesSkipFailingMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newTraffic(t, 0, inbox.ConsumerConfig{Retry: retries(1000)}, memqueue.Options{})
		f.put("bad", 200)
		f.start()
		for range 100 { // each bad one fails while others succeed
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

// Handlers take longer than a suspect waits for another message to start. A started message is awaited, so
// that a stream of suspects does not pause the consumer.
func TestSuspects_waitForSlowHandlers(t *testing.T) {
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

// The queue is silent for a second, and the server of every second message is unreachable. That is not an
// outage, and the next messages do not wait.
func TestPause_notForASilentQueue(t *testing.T) {
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

// A server that all messages need is down, and few messages arrive. They are enough for a pause, and the last
// one is processed soon after the server is back.
func TestPause_fewMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newTraffic(t, 0, inbox.ConsumerConfig{}, memqueue.Options{})
		f.start()
		f.down.Store(true)
		f.put("few", 2)
		time.Sleep(time.Second)
		f.ready() // not enough for a pause yet
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

// A message fails once because a server was unreachable, and there are no others to compare with. It is tried
// again soon, without a pause.
func TestSuspect_retriedSoonOnQuietQueue(t *testing.T) {
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

// A server is down and that shows slowly: again and again, too few messages fail before others have started.
// The consumer pauses all the same.
func TestPause_outageThatShowsSlowly(t *testing.T) {
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

// A message that fails by itself is tried again after a silence, and another message arrives just then. That
// one is processed at once, and there is no pause.
func TestSuspect_newMessageDoesNotWait(t *testing.T) {
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

// A consumer of one message at a time has more messages ready when one ends. They are tried before the
// suspects themselves are.
func TestSuspect_readyMessagesAreTriedFirst(t *testing.T) {
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

// A server is down for a moment, and handlers are slow: the other messages do not wait for the end of the
// first probe.
func TestPause_endsBeforeSlowProbe(t *testing.T) {
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

// A server is down, and one handler never returns: a probe waits for it until the handler counts as stuck.
func TestPause_probeThatNeverEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const good = 20
		var down, deaf atomic.Bool
		var passed, calls atomic.Int32
		release := make(chan struct{})
		end := sync.OnceFunc(func() { close(release) })
		t.Cleanup(end) // even if the test fails
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

// One message's server is always unreachable, and the good messages are slow and few. Each success ends the
// pause and shows that the failing message is at fault.
func TestSuspect_becomesDeadLetterBesideSlowMessages(t *testing.T) {
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
