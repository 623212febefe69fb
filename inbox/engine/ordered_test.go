package engine_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
)

type processorFunc func(ctx context.Context, m *inbox.Message) error

func (f processorFunc) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = f(ctx, m)
	}
	return results
}

// A key waits behind its failing message, others go on; after a dead letter the key goes on.
func TestOrderedRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		var seen []string
		p := processorFunc(func(_ context.Context, m *inbox.Message) error {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, fmt.Sprint(m.Key, m.Name, m.Attempt))
			if m.Name == "bad" {
				return errBroken
			}
			return nil
		})
		b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Concurrency: 1, Prefetch: 10}}, memqueue.Options{Exclusive: true})
		for _, m := range []inbox.Message{{Key: "a", Name: "bad"}, {Key: "a", Name: "x"}, {Key: "b", Name: "y"}, {Name: "z"}} {
			m.ID = ids.New()
			noError(t, b.queue.Put(&m))
		}
		b.start()
		b.idle()
		b.stop()
		if got := fmt.Sprint(seen); got != "[abad1 by1 z1 abad2 abad3 ax1]" {
			t.Error(got)
		}
		letters := b.letters("default")
		if len(letters) != 1 || letters[0].Attempts != 3 || len(letters[0].Message.History) == 0 {
			t.Errorf("%+v", letters)
		}
	})
}

// An ordered retry that waits for longer than the broker does keeps its attempts, and its session
// begins anew in time.
func TestOrderedHold(t *testing.T) {
	t.Parallel()
	for _, noted := range []bool{false, true} {
		t.Run(fmt.Sprintf("ledger %v", noted), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var runs atomic.Int64
				p := processorFunc(func(_ context.Context, m *inbox.Message) error {
					if n := int(runs.Add(1)); m.Attempt != n {
						t.Errorf("run %d is attempt %d", n, m.Attempt)
					}
					return inbox.RetryAfter(errBroken, 20*time.Minute)
				})
				var processor inbox.Processor = p
				if noted {
					processor = withLedger{p, memory.NewLedger()}
				}
				broker := memqueue.NewBroker()
				queue := broker.Queue("orders")
				var opened atomic.Int64
				source := held{queue.Source(memqueue.Options{Exclusive: true, Fault: func(at memqueue.Step, _ *inbox.Message) memqueue.Outcome {
					if at == memqueue.Open {
						opened.Add(1)
					}
					return memqueue.OK
				}})}
				b := &bench{t: t, broker: broker, queue: queue, source: source.Source}
				b.consumer = newConsumer(t, source, processor, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Retry: inbox.RetryPolicy{MaxAge: 2 * time.Hour}}})
				noError(t, queue.Put(&inbox.Message{ID: ids.New(), Name: "x", Key: "k"}))
				b.start()
				b.idle()
				b.stop()
				if n := runs.Load(); n < 7 || n > 8 {
					t.Errorf("%d runs in 2 hours", n)
				}
				if n := opened.Load(); n < 8 || n > 12 {
					t.Errorf("%d sessions in 2 hours", n)
				}
			})
		})
	}
}

// held is a source whose broker takes unsettled messages back after half an hour.
type held struct{ *memqueue.Source }

func (s held) Traits() (t driver.Traits) {
	t = s.Source.Traits()
	t.Hold = 30 * time.Minute
	return t
}
