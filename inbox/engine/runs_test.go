package engine_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

// A run ends in good order at each of its limits, and can be begun again.
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

// What is settled is counted by outcome and class, what is in hand is shown, and every attempt is measured.
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
		if err != nil || seen["holdfast.inbox.test.in_hand{queue=orders}"] != 1 || seen["holdfast.inbox.test.held{queue=orders}"] != 0 {
			t.Errorf("gauges %v, %v", seen, err)
		}
		close(release)
		b.idle()
		synctest.Wait()
		for what, n := range map[string]float64{"outcome=acked": 8, "class=default,outcome=retried": 2, "class=payment,outcome=dead": 1} {
			key := "holdfast.inbox.test.settled{" + what + ",queue=orders}"
			if values := meter.Values(key); len(values) != 1 || values[0] != n {
				t.Errorf("%s is %v, want %v", key, values, n)
			}
		}
		took := meter.Values("holdfast.inbox.test.process.duration{queue=orders}")
		if len(took) != 11 || slices.Max(took) != 60 || slices.Min(took) != 0 {
			t.Errorf("attempts took %v, want 11, all but the slow one no time", took)
		}
		b.stop()
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
	if err != nil {
		t.Fatal(err)
	}
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
	if err := <-done; err != nil {
		t.Error(err)
	}
}
