package outbox_test

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// exits is a Source that ends the goroutine of the caller when told to.
type exits struct {
	driver.Source
	now atomic.Bool
}

func (e *exits) Claim(ctx context.Context, r driver.Claim) (driver.Batch, error) {
	if e.now.Load() {
		runtime.Goexit()
	}
	return e.Source.Claim(ctx, r)
}

// The Done channel of context.Background is nil, and Run works on it like on any other.
func TestRunOnBackground(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		source := &exits{Source: b.store}
		b.over(source, outbox.RelayConfig{})
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			b.Errorf("Run returned %v", b.relay.Run(context.Background()))
		}()
		for _, n := range []int{1, 2} {
			b.write(message("k", n))
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		b.wantReceived("1", "2")
		source.now.Store(true) // nothing else ends Run
		<-ended
	})
}

func TestDrainOnBackground(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.write(message("k", 1))
		for _, bounds := range []outbox.Bounds{{}, {TimeLimit: time.Minute}} {
			if _, err := b.relay.Drain(context.Background(), bounds); err != nil {
				b.Error(err)
			}
		}
		b.wantReceived("1")
	})
}

// A relay that has ended is not ready, whatever its last look found.
func TestNotReadyAfterRun(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		for range 2 {
			stop := b.start()
			time.Sleep(time.Minute)
			if err := b.relay.Ready(b.Context()); err != nil {
				b.Errorf("while it runs: %v", err)
			}
			stop()
			if b.relay.Ready(b.Context()) == nil {
				b.Error("ready after Run has ended")
			}
		}
	})
}
