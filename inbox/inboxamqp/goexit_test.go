package inboxamqp_test

import (
	"context"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

// goneProcessor exits its goroutine at every message.
func goneProcessor() inbox.Processor {
	return processorFunc(func(context.Context, *inbox.Message) error { runtime.Goexit(); return nil })
}

// Messages of a batch, and those that are processed one by one after it or by the ledger's
// leave, are settled when their handler exits the goroutine, and the only worker is replaced.
func TestGoexitOfManyKinds(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]config{
		"one by one": {},
		"batches":    {Batch: 5},
		"ledger":     {Batch: 5, Ledger: memory.NewLedger(), MaxCrashes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			cfg.Queue, cfg.Concurrency = "orders", 1
			cfg.Retry = quick
			cfg.Retry.MaxAttempts = 2
			r := consume(t, b, goneProcessor(), cfg)
			const n = 12
			for range n {
				b.Publish(t, "", "orders", order())
			}
			for _, letter := range b.Take(t, "failed.default", n, patience) {
				if text, _ := letter.Headers["holdfast-error"].(string); !strings.Contains(text, "exited its goroutine") {
					t.Errorf("error %q", text)
				}
				if attempt := letter.Headers["holdfast-attempt"]; attempt != "2" {
					t.Errorf("attempt %v", attempt)
				}
			}
			r.stop(t)
		})
	}
}

// However many workers have been replaced, there are as many as before; and a drain is not
// kept waiting by one whose handler exits meanwhile.
func TestGoexitKeepsTheNumberOfWorkers(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	const workers, gone = 3, 20
	var begun atomic.Int64
	entered, release := make(chan struct{}, 2*workers), make(chan struct{})
	cfg := config{Queue: "orders", Concurrency: workers, Retry: inbox.RetryPolicy{MaxAttempts: 1}}
	r := consume(t, b, processorFunc(func(_ context.Context, m *inbox.Message) error {
		if m.Name != "gone" {
			begun.Add(1)
			entered <- struct{}{}
			<-release
		}
		runtime.Goexit()
		return nil
	}), cfg)
	p := order()
	p.Type = "gone"
	for range gone {
		b.Publish(t, "", "orders", p)
	}
	b.Take(t, "failed.default", gone, patience)
	for range 2 * workers {
		b.Publish(t, "", "orders", order())
	}
	for range workers {
		<-entered
	}
	r.cancel()
	awaitDepth(t, b, "orders", workers) // what no worker has begun is given back
	close(release)
	r.await(t)
	if n := begun.Load(); n != workers {
		t.Errorf("%d messages at once, want %d", n, workers)
	}
	awaitDepth(t, b, "failed.default", workers)
}
