package engine_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

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

// A message that must run alone uses up the limit once, when it runs.
func TestMessageLimitOfSuspects(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ledger := memory.NewLedger()
		got := &recorder{}
		b := newBench(t, withLedger{got, ledger}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{MessageLimit: 1}}, memqueue.Options{})
		suspect := b.put("suspect", 1)[0]
		deliverInVain(t, b)
		if err := ledger.Start(t.Context(), &inbox.Message{ID: suspect, Attempt: 1}); err != nil {
			t.Fatal(err)
		}
		b.start()
		time.Sleep(time.Minute)
		if n := len(got.messages()); n != 1 {
			t.Errorf("%d messages processed", n)
		}
	})
}

// Messages of which too many wait for their handler come again about when it has time for them.
func TestHandlerLimitAndManyMessages(t *testing.T) {
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
