package inboxnats

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
)

// Run renews the lease while Close releases it. The next process finds it free.
func TestLease_leaveDuringRenewal(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	source := newOrdered(t, conn, natstest.Name(t, conn), Stream{})
	for range 20 {
		l := &lease{source: source}
		taken, err := l.take(t.Context())
		if err != nil || !taken {
			t.Fatalf("taken %v, error %v", taken, err)
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
		must(t, l.leave(t.Context()))
		close(left)
		renewing.Wait()
		if last, err := l.last(t.Context()); err != nil || string(last.Data) != leaseFree {
			t.Errorf("the released lease is %q, error %v", last.Data, err)
		}
	}
}

// The answer to a renewal is lost. The process keeps its lease, other processes do not get it, and its next session takes
// it at once.
func TestLease_lostAnswer(t *testing.T) {
	t.Parallel()
	url := testenv.NATSURL(t)
	direct := natstest.Connect(t, url)
	name := natstest.Name(t, direct)
	proxy := testenv.NewProxy(t, url)
	own := newOrdered(t, natstest.Connect(t, proxy.URL()), name, Stream{Timeout: 500 * time.Millisecond})
	other := newOrdered(t, direct, name, Stream{})
	take := func(by *source) (*lease, bool) {
		l := &lease{source: by}
		taken, err := l.take(t.Context())
		must(t, err)
		return l, taken
	}
	l, taken := take(own)
	if !taken {
		t.Fatal("a lease without an owner is not taken")
	}
	proxy.DropReplies()
	must(t, l.renew(t.Context())) // the failed call is logged: the lease lasts
	before := l.rev
	testenv.Eventually(t, func() error {
		last, err := (&lease{source: other}).last(t.Context())
		if err == nil && last.Sequence == before {
			err = errors.New("the renewal has not arrived")
		}
		return err
	})
	proxy.Heal()
	testenv.Eventually(t, func() error {
		if err := l.renew(t.Context()); err != nil || l.rev == before {
			return fmt.Errorf("the lease is not renewed: %w", err)
		}
		return nil
	})
	if _, taken := take(other); taken {
		t.Error("another process has taken the lease")
	}
	if _, taken := take(own); !taken {
		t.Error("the next session of the process does not take the lease")
	}
}

// newOrdered returns the source of an ordered consumer of a stream, which exists afterwards.
func newOrdered(t *testing.T, conn *nats.Conn, name string, from Stream) *source {
	t.Helper()
	from.Name = name
	consumer := newTestConsumer(t, conn, from, inbox.ConsumerConfig{Ordered: true})
	return consumer.parts[0]
}
