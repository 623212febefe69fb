package outbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// A batch that takes longer than a lease keeps its lanes.
func TestSlowBatchKeepsItsLanes(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.publisher.Latency(9 * time.Second)
		b.write(message("k", 1), message("", 2))
		defer b.start()()
		for range 9 {
			time.Sleep(time.Second - time.Nanosecond)
			taken, err := b.store.Claim(b.Context(), driver.Claim{Limit: 10, Lease: time.Second, Alone: true})
			if err != nil || len(taken.Messages) > 0 || taken.Suspect {
				b.Fatalf("claimed %v, suspect %v, %v", bodies(taken.Messages), taken.Suspect, err)
			}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		b.wantReceived("1", "2")
	})
}

// renewals is a Source whose Renew is that of a store with a fault.
type renewals struct {
	driver.Source
	once  bool // it gives one batch
	given atomic.Bool
	count atomic.Int64
	renew func(ctx context.Context, n int64) error // nil: as ever
}

func (s *renewals) Claim(ctx context.Context, req driver.Claim) (driver.Batch, error) {
	if s.once && s.given.Swap(true) {
		return driver.Batch{}, nil
	}
	return s.Source.Claim(ctx, req)
}

func (s *renewals) Renew(ctx context.Context, leases []driver.Lease, ttl time.Duration) ([]driver.Lease, error) {
	if err := s.renew(ctx, s.count.Add(1)); err != nil {
		return nil, err
	}
	return s.Source.Renew(ctx, leases, ttl)
}

// What cannot renew its leases sends nothing more, since another relay may be sending it.
func TestNothingIsSentWithoutALease(t *testing.T) {
	for name, fault := range map[string]func(context.Context) error{
		"refused": func(context.Context) error { return errors.New("connection refused") },
		"silent":  func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{PublishTimeout: time.Minute}, func(b *bench) {
				s := &renewals{Source: b.store, once: true, renew: func(ctx context.Context, _ int64) error { return fault(ctx) }}
				b.over(s, outbox.RelayConfig{PublishTimeout: time.Minute})
				b.publisher.Latency(900 * time.Millisecond) // of each message of the key
				for n := range 20 {
					b.write(message("k", n))
				}
				stop := b.start()
				time.Sleep(20 * time.Second)
				stop()
				if got := bodies(b.publisher.Received()); !slices.Equal(got, []string{"0", "1", "2", "3", "4", "5", "6"}) {
					b.Errorf("sent %v within a lease of 6 s, at one every 0.9 s", got)
				}
				if left := b.store.Pending(); len(left) != 13 {
					b.Errorf("%d left, want what was not sent", len(left))
				}
			})
		})
	}
}

// What is settled has no leases to renew any more.
func TestNoRenewalAfterSettling(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		s := &renewals{Source: b.store, renew: func(context.Context, int64) error { return nil }}
		b.over(s, outbox.RelayConfig{})
		b.write(message("", 1))
		defer b.start()()
		time.Sleep(5 * time.Second)
		if n := s.count.Load(); n > 0 {
			b.Errorf("%d renewals", n)
		}
	})
}

// One connection that is silent costs no lease.
func TestRenewalOnAnotherConnection(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		s := &renewals{Source: b.store, renew: func(ctx context.Context, n int64) error {
			if n%2 == 1 {
				<-ctx.Done()
			}
			return ctx.Err()
		}}
		b.over(s, outbox.RelayConfig{PublishTimeout: time.Minute})
		b.publisher.Latency(time.Second)
		var want []string
		for n := range 20 {
			b.write(message("k", n))
			want = append(want, string(message("k", n).Body))
		}
		defer b.start()()
		time.Sleep(21 * time.Second)
		b.wantReceived(want...)
		if len(b.store.Pending()) > 0 {
			b.Errorf("left %v", bodies(b.store.Pending()))
		}
	})
}

// lose claims as relays that are killed before they settle.
func (b *bench) lose(claims, limit int) {
	b.Helper()
	for range claims {
		batch, err := b.store.Claim(b.Context(), driver.Claim{Limit: limit, Lease: time.Second, Alone: true})
		if err != nil || len(batch.Messages) == 0 {
			b.Fatalf("claimed %d, %v", len(batch.Messages), err)
		}
		time.Sleep(2 * time.Second)
	}
}

func TestMessageThatKillsRelaysIsQuarantined(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		for n := range 4 {
			b.write(message("k", n))
		}
		b.lose(1+3, 8) // the whole lane, and then its first message alone
		if report := b.drain(outbox.Bounds{}); report.Dead != 1 || report.Published != 3 {
			b.Errorf("report %+v", report)
		}
		b.wantReceived("1", "2", "3")
		dead := b.dead()
		if len(dead) != 1 || dead[0].Class != string(driver.Quarantined) || !strings.Contains(dead[0].Error, "3 relays in a row") {
			b.Errorf("dead letters %+v", dead)
		}
	})
}

func TestFewerLossesCostNothing(t *testing.T) {
	inBubble(t, outbox.RelayConfig{MaxCrashes: 4}, func(b *bench) {
		b.write(message("k", 0), message("k", 1))
		b.lose(1+3, 8)
		b.drain(outbox.Bounds{})
		b.wantReceived("0", "1")
		if dead := b.dead(); len(dead) > 0 {
			b.Errorf("dead letters %+v", dead)
		}
	})
}

// While messages under suspicion are published, nothing else is in hand that they could take along.
func TestSuspectsArePublishedAlone(t *testing.T) {
	inBubble(t, outbox.RelayConfig{BatchSize: 4}, func(b *bench) {
		b.write(message("suspect", 0), message("suspect", 1))
		b.lose(1, 8)
		for n := range 100 {
			b.write(message("", n))
		}
		const latency = 10 * time.Millisecond
		var suspects, others []time.Time
		b.publisher.Respond(func(m driver.Message) error {
			if m.Key == "suspect" {
				suspects = append(suspects, time.Now())
			} else {
				others = append(others, time.Now())
			}
			return nil
		})
		b.publisher.Latency(latency)
		b.drain(outbox.Bounds{})
		if len(suspects) != 2 || len(others) != 100 {
			b.Fatalf("%d suspects and %d others were sent", len(suspects), len(others))
		}
		for _, at := range suspects {
			for _, beside := range others {
				if d := at.Sub(beside).Abs(); d < latency {
					b.Fatalf("another message was in flight %v from a suspect", d)
				}
			}
		}
	})
}
