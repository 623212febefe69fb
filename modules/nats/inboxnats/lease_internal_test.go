package inboxnats

import (
	"log/slog"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
)

// Run renews the lease while Close releases it. The next process finds it free.
func TestLease_leaveDuringRenewal(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	consumer, err := NewConsumer(conn, Stream{Name: natstest.Name(t, conn)}, inbox.NewMux(), inbox.ConsumerConfig{
		Name: "billing", Ordered: true, Logger: slog.New(slog.DiscardHandler),
	})
	if err == nil {
		err = consumer.Setup(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		l := &lease{source: consumer.parts[0]}
		taken, err := l.take(t.Context())
		if err != nil || !taken || l.rev > 1 && !l.clean {
			t.Fatalf("taken %v, clean %v, error %v", taken, l.clean, err)
		}
		begun, left := make(chan struct{}), make(chan struct{})
		var renewing sync.WaitGroup
		renewing.Go(func() {
			for first := true; ; first = false {
				_ = l.renew(t.Context()) // fails once the lease is released
				if first {
					close(begun)
				}
				select {
				case <-left:
					return
				default:
				}
			}
		})
		<-begun
		err = l.leave(t.Context(), true)
		close(left)
		if err != nil {
			t.Error(err)
		}
		renewing.Wait()
	}
}
