package outbox_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// watched is a Source that counts its claims. Nothing wakes its relay.
type watched struct {
	driver.Source
	claims atomic.Int64
}

func (w *watched) Claim(ctx context.Context, r driver.Claim) (driver.Batch, error) {
	w.claims.Add(1)
	return w.Source.Claim(ctx, r)
}

// What is committed while its lane is leased is published when the batch has been: whoever was woken for it has found
// nothing. Where there is none, nobody looks.
func TestWhatComesMeanwhile(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		w := &watched{Source: b.store}
		b.over(w, outbox.RelayConfig{PollInterval: time.Hour})
		b.publisher.Latency(100 * time.Millisecond)
		b.write(message("k", 1))
		defer b.start()()
		time.Sleep(50 * time.Millisecond)
		b.write(message("k", 2))
		b.relay.Wake()
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		b.wantReceived("1", "2")
		if got := w.claims.Load(); got != 3 {
			b.Errorf("%d claims, want one of each message and one between", got)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if got := w.claims.Load(); got != 3 {
			b.Errorf("%d claims, and there was nothing more to find", got)
		}
	})
}

// The lanes of a relay that was killed are taken over when its lease ends, however seldom others look.
func TestLanesOfTheKilledAreTakenOver(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.over(&watched{Source: b.store}, outbox.RelayConfig{PollInterval: time.Hour})
		b.write(message("k", 1))
		if _, err := b.store.Claim(b.Context(), driver.Claim{Limit: 1, Lease: 6 * time.Second}); err != nil {
			b.Fatal(err)
		}
		defer b.start()()
		time.Sleep(6*time.Second + time.Millisecond)
		synctest.Wait()
		b.wantReceived("1")
	})
}
