package outbox_test

import (
	"context"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
)

func TestDrainBounds(t *testing.T) {
	t.Run("default limit", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			var msgs []outbox.Message
			for n := range 1100 {
				msgs = append(msgs, message("", n))
			}
			b.write(msgs...)
			if report := b.drain(outbox.Bounds{}); report.Published != 1000 {
				b.Errorf("report %+v", report)
			}
		})
	})
	t.Run("time limit waits for more", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			begin := time.Now()
			go func() {
				time.Sleep(30 * time.Second)
				b.write(message("", 1))
			}()
			report := b.drain(outbox.Bounds{TimeLimit: 55 * time.Second})
			if took := time.Since(begin); report.Published != 1 || report.Ended != "time limit" || took != 55*time.Second {
				b.Errorf("report %+v after %v", report, took)
			}
		})
	})
	t.Run("memory limit", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{BatchSize: 3}, func(b *bench) {
			b.publisher.Latency(time.Second)
			for n := range 50 {
				b.write(message("", n))
			}
			report := b.drain(outbox.Bounds{MemoryLimit: 1, TimeLimit: time.Hour})
			if n := report.Published; n < 1 || n > 3 || report.Ended != "memory limit" || report.ExitCode() != 0 {
				b.Errorf("%+v, want one batch of at most 3", report)
			}
			if report := b.drain(outbox.Bounds{MemoryLimit: 1 << 50}); report.Ended != "empty" || len(b.store.Pending()) != 0 {
				b.Errorf("with room: %+v", report)
			}
		})
	})
	t.Run("cancelled", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			ctx, cancel := context.WithCancel(b.Context())
			time.AfterFunc(time.Second, cancel)
			if report, err := b.relay.Drain(ctx, outbox.Bounds{TimeLimit: time.Hour}); err != nil || report.Ended != "" {
				b.Errorf("%+v, %v", report, err)
			}
		})
	})
	t.Run("negative", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			if _, err := b.relay.Drain(b.Context(), outbox.Bounds{Limit: -1}); err == nil {
				b.Error("accepted")
			}
		})
	})
}
