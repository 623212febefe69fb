package engine_test

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

// Dead letters are counted by class about once a minute, and only while somebody looks.
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
			t.Errorf("counted %d times although nobody looked", counted.Load())
		}
		const payment, other = "holdfast.inbox.test.dead_letters{class=payment,queue=orders}", "holdfast.inbox.test.dead_letters{class=default,queue=orders}"
		look := func() map[string]float64 {
			seen, err := meter.Collect(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return seen
		}
		look()
		time.Sleep(6 * time.Second)
		if seen := look(); seen[payment] != 3 || seen[other] != 1 {
			t.Errorf("depths %v, want 3 and 1", seen)
		}
		if got := meter.Values("holdfast.inbox.test.settled{class=payment,outcome=dead,queue=orders}"); !slices.Equal(got, []float64{3}) {
			t.Errorf("counted as dead of class payment %v, want 3", got)
		}
		before := counted.Load()
		for range 600 { // somebody looks each second
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

// counting counts how often dead letters are counted.
type counting struct {
	driver.Source
	n *atomic.Int64
}

func (s counting) Letters() driver.Letters {
	return countingLetters{s.Source.(driver.Keeper).Letters(), s.n}
}

type countingLetters struct {
	driver.Letters
	n *atomic.Int64
}

func (l countingLetters) Depths(ctx context.Context) ([]driver.Depth, error) {
	l.n.Add(1)
	return l.Letters.Depths(ctx)
}
