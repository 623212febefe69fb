package engine_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

// A run ends cleanly at each of its limits, and can be started again.
func TestLimits(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]inbox.ConsumerConfig{
		"messages": {MessageLimit: 3}, "time": {TimeLimit: time.Minute}, "memory": {MemoryLimit: 1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				got := &recorder{}
				b := newBench(t, got, engine.Config{ConsumerConfig: cfg}, memqueue.Options{})
				for range 2 {
					before := len(got.messages())
					b.put("good", 4)
					b.start()
					if err := <-b.ended; err != nil {
						t.Error(err)
					}
					if n := len(got.messages()) - before; name == "messages" && n != 3 || name != "messages" && n != 4 {
						t.Errorf("%d messages", n)
					}
				}
				if err := ready(b); err == nil || !strings.Contains(err.Error(), "not running") {
					t.Errorf("ready: %v", err)
				}
			})
		})
	}
}

// Settled messages are counted by outcome and class, messages in flight are shown, and every attempt is
// measured.
func TestMetrics(t *testing.T) {
	bubble(t, func(t *testing.T) {
		meter := &metrictest.Recorder{}
		release := make(chan struct{})
		got := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
			switch {
			case m.Name == "slow":
				<-release
			case m.Name == "bad" && m.Attempt < 2:
				return errBroken
			case m.Name == "dead":
				return inbox.Classed(inbox.Unrecoverable(errBroken), "payment")
			}
			return nil
		}}
		b := newBench(t, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{MeterProvider: meter, Classes: []string{"payment"}, Concurrency: 4}}, memqueue.Options{})
		b.put("good", 5)
		b.put("bad", 2)
		b.put("dead", 1)
		b.put("slow", 1)
		b.start()
		time.Sleep(time.Minute)
		seen, err := meter.Collect(t.Context())
		if err != nil || seen["holdfast.inbox.test.in_hand{consumer=orders,queue=orders}"] != 1 || seen["holdfast.inbox.test.held{consumer=orders,queue=orders}"] != 0 {
			t.Errorf("gauges %v, %v", seen, err)
		}
		close(release)
		b.idle()
		synctest.Wait()
		for what, n := range map[string]float64{"consumer=orders,outcome=acked": 8, "class=default,consumer=orders,outcome=retried": 2, "class=payment,consumer=orders,outcome=dead": 1} {
			key := "holdfast.inbox.test.settled{" + what + ",queue=orders}"
			if values := meter.Values(key); len(values) != 1 || values[0] != n {
				t.Errorf("%s is %v, want %v", key, values, n)
			}
		}
		took := meter.Values("holdfast.inbox.test.process.duration{consumer=orders,queue=orders}")
		if len(took) != 11 || slices.Max(took) != 60 || slices.Min(took) != 0 {
			t.Errorf("attempts took %v, want 11, all but the slow one no time", took)
		}
		b.stop()
	})
}

// Several consumers of one queue report on their own, and consumers with one name add up. The broker counts the dead letters
// and the backlog of all consumers with one name, so they are not added.
func TestMetrics_consumersOfOneQueue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		meter := &metrictest.Recorder{}
		release := make(chan struct{})
		for i, name := range []string{"billing", "mail", "mail"} {
			p := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
				if m.Name == "dead" {
					return inbox.Unrecoverable(errBroken)
				}
				<-release
				return nil
			}}
			cfg := engine.Config{ConsumerConfig: inbox.ConsumerConfig{Name: name, MeterProvider: meter}}
			b := newBench(t, p, cfg, memqueue.Options{})
			b.consumer = newConsumer(t, counting{b.source, &atomic.Int64{}}, p, cfg)
			b.put("dead", len(name))
			b.put("slow", i+1)
			b.start()
			defer b.stop()
		}
		defer close(release)
		var seen map[string]float64
		for range 2 { // a reading starts the count of dead letters
			time.Sleep(time.Minute)
			var err error
			seen, err = meter.Collect(t.Context())
			noError(t, err)
		}
		for name, inHand := range map[string]float64{"billing": 1, "mail": 2 + 3} {
			dead := float64(len(name))
			for key, want := range map[string]float64{
				"in_hand{consumer=" + name + ",queue=orders}":                          inHand,
				"held{consumer=" + name + ",queue=orders}":                             0,
				"dead_letters{class=unrecoverable,consumer=" + name + ",queue=orders}": dead,
				"backlog{consumer=" + name + ",queue=orders,state=waiting}":            5,
			} {
				if got, ok := seen["holdfast.inbox.test."+key]; !ok || got != want {
					t.Errorf("%s is %v, want %v; all: %v", key, got, want, seen)
				}
			}
			settled := meter.Values("holdfast.inbox.test.settled{class=unrecoverable,consumer=" + name + ",outcome=dead,queue=orders}")
			if want := map[string]float64{"billing": dead, "mail": 2 * dead}[name]; !slices.Equal(settled, []float64{want}) {
				t.Errorf("%s: %v settled as dead, want %v", name, settled, want)
			}
		}
	})
}

// New names every violation.
func TestNew(t *testing.T) {
	t.Parallel()
	_, err := engine.New(nil, nil, engine.Config{
		Package: "inboxtest", Timeout: -1, MaxBodyBytes: -1, ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Batch: -1},
	})
	for _, want := range []string{"source", "processor", "Timeout", "MaxBodyBytes", "Ordered", "Batch"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not name %s", err, want)
		}
	}
	source := memqueue.NewBroker().Queue("q").Source(memqueue.Options{})
	c, err := engine.New(source, &recorder{}, engine.Config{Package: "inboxtest", Queue: "q"})
	noError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	for c.Ready(ctx) != nil {
		time.Sleep(time.Millisecond)
	}
	if err := c.Run(ctx); err == nil || !strings.Contains(err.Error(), "running already") {
		t.Errorf("a second Run: %v", err)
	}
	cancel()
	noError(t, <-done)
}

// Dead letters are counted by class about once a minute, and only while the gauge is read.
func TestDepthGauge(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var counted atomic.Int64
		meter := &metrictest.Recorder{}
		p := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
			return inbox.Classed(inbox.Unrecoverable(errBroken), m.Name)
		}}
		b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{MeterProvider: meter, Classes: []string{"payment"}}}, memqueue.Options{})
		b.consumer = newConsumer(t, counting{b.source, &counted}, p, engine.Config{
			ConsumerConfig: inbox.ConsumerConfig{MeterProvider: meter, Classes: []string{"payment"}},
		})
		b.start()
		b.put("payment", 3)
		b.put("unheard-of", 1)
		time.Sleep(time.Hour)
		if counted.Load() != 0 {
			t.Errorf("counted %d times although the gauge was not read", counted.Load())
		}
		const payment, other = "holdfast.inbox.test.dead_letters{class=payment,consumer=orders,queue=orders}", "holdfast.inbox.test.dead_letters{class=default,consumer=orders,queue=orders}"
		look := func() map[string]float64 {
			seen, err := meter.Collect(t.Context())
			noError(t, err)
			return seen
		}
		look()
		time.Sleep(6 * time.Second)
		if seen := look(); seen[payment] != 3 || seen[other] != 1 {
			t.Errorf("depths %v, want 3 and 1", seen)
		}
		const backlog = "holdfast.inbox.test.backlog{consumer=orders,queue=orders,state="
		if seen := look(); seen[backlog+"waiting}"] != 5 || seen[backlog+"retrying}"] != 2 || seen[backlog+"put_off}"] != 1 {
			t.Errorf("backlog %v, want 5, 2 and 1", seen)
		}
		if got := meter.Values("holdfast.inbox.test.settled{class=payment,consumer=orders,outcome=dead,queue=orders}"); !slices.Equal(got, []float64{3}) {
			t.Errorf("counted as dead of class payment %v, want 3", got)
		}
		before := counted.Load()
		for range 600 { // the gauge is read each second
			time.Sleep(time.Second)
			look()
		}
		if n := counted.Load() - before; n < 9 || n > 11 {
			t.Errorf("counted %d times in ten minutes", n)
		}
		b.stop()
		if seen := look(); len(seen) != 0 {
			t.Errorf("after the end %v", seen)
		}
	})
}

// counting counts how often dead letters are counted. It has a fixed backlog.
type counting struct {
	driver.Source
	n *atomic.Int64
}

func (counting) Backlog(context.Context) (driver.Backlog, error) {
	return driver.Backlog{Waiting: 5, Retrying: 2, PutOff: 1}, nil
}

func (s counting) DeadLetters() driver.DeadLetters {
	return countingLetters{s.Source.(driver.Keeper).DeadLetters(), s.n}
}

type countingLetters struct {
	driver.DeadLetters
	n *atomic.Int64
}

func (l countingLetters) Depths(ctx context.Context) ([]driver.Depth, error) {
	l.n.Add(1)
	return l.DeadLetters.Depths(ctx)
}

// Messages that wait for their handler's limit run in whole batches.
func TestHandlerLimitInBatches(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const messages, batch = 200, 10
		got := &recorder{}
		got.fail = func(context.Context, *inbox.Message) error { time.Sleep(100 * time.Millisecond); return nil }
		b := newBench(t, limited{got}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4, Batch: batch, Prefetch: 200}}, memqueue.Options{})
		b.put("slow", messages)
		b.start()
		b.idle()
		b.stop()
		if n := len(got.sizes); n > 2*messages/batch {
			t.Errorf("%d calls for %d messages", n, messages)
		}
		if n := len(got.messages()); n != messages {
			t.Errorf("%d messages processed", n)
		}
	})
}

// A message that must run alone counts towards MessageLimit once, when it runs.
func TestMessageLimitOfSuspects(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ledger := memory.NewLedger()
		got := &recorder{}
		b := newBench(t, withLedger{got, ledger}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{MessageLimit: 1}}, memqueue.Options{})
		suspect := b.put("suspect", 1)[0]
		deliverInVain(t, b)
		noError(t, ledger.Start(t.Context(), &inbox.Message{ID: suspect, Attempt: 1}))
		b.start()
		time.Sleep(time.Minute)
		if n := len(got.messages()); n != 1 {
			t.Errorf("%d messages processed", n)
		}
	})
}

// If too many messages wait for their handler, the excess returns about when the handler has time.
func TestHandlerLimit_excessReturnsInTime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const messages = 300
		var moves atomic.Int64
		got := &recorder{fail: func(context.Context, *inbox.Message) error { time.Sleep(2 * time.Second); return nil }}
		b := newBench(t, limited{got}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Retry: inbox.RetryPolicy{MaxDelay: time.Minute}}}, memqueue.Options{
			Fault: func(at memqueue.Step, _ *inbox.Message) memqueue.Outcome {
				if at == memqueue.Move {
					moves.Add(1)
				}
				return memqueue.OK
			},
		})
		began := time.Now()
		b.put("slow", messages)
		b.start()
		b.idle()
		took := time.Since(began) // at two at once 300 s
		b.stop()
		if n := moves.Load(); n > 30*messages || took > 420*time.Second {
			t.Errorf("%d moves, in %v", n, took)
		}
	})
}

var errUncounted = errors.New("uncounted")

// brokenLetters returns an error for every count.
type brokenLetters struct{ driver.Source }

func (s brokenLetters) DeadLetters() driver.DeadLetters { return s }

func (brokenLetters) Depths(context.Context) ([]driver.Depth, error) { return nil, errUncounted }

func (brokenLetters) Scan(context.Context, string, func(*inbox.DeadLetter) (driver.Outcome, error), func(inbox.DeadLetter, error)) error {
	return errUncounted
}

// If dead letters cannot be counted, the gauge has no number and nothing else fails.
func TestDepthGaugeWithoutCounts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		meter := &metrictest.Recorder{}
		p := &recorder{}
		cfg := engine.Config{ConsumerConfig: inbox.ConsumerConfig{MeterProvider: meter}}
		b := newBench(t, p, cfg, memqueue.Options{})
		b.consumer = newConsumer(t, brokenLetters{b.source}, p, cfg)
		b.start()
		for range 3 {
			time.Sleep(time.Minute)
			seen, err := meter.Collect(t.Context())
			noError(t, err)
			for key := range seen {
				if strings.Contains(key, "dead_letters") {
					t.Errorf("there is %s", key)
				}
			}
		}
		b.put("a", 1)
		b.idle()
		b.stop()
	})
}
