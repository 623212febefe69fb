package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// renewals is a Source with a configurable Renew.
type renewals struct {
	driver.Source
	once  bool // Claim returns only one batch
	given atomic.Bool
	count atomic.Int64
	renew func(ctx context.Context, n int64) error // runs before the real Renew
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

// A relay that cannot renew its leases sends nothing more, because another relay may be sending the messages.
func TestNothingIsSentWithoutALease(t *testing.T) {
	for name, fault := range map[string]func(context.Context) error{
		"refused": func(context.Context) error { return errors.New("connection refused") },
		"silent":  func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{PublishTimeout: time.Minute}, func(b *bench) {
				s := &renewals{Source: b.store, once: true, renew: func(ctx context.Context, _ int64) error { return fault(ctx) }}
				b.over(s, outbox.RelayConfig{PublishTimeout: time.Minute})
				b.publisher.Latency(900 * time.Millisecond) // for each message of the key
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
					b.Errorf("%d left, want the 13 unsent messages", len(left))
				}
			})
		})
	}
}

// After settling, there are no leases to renew.
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

// One silent connection loses no lease.
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

// lose claims messages like relays that are killed before they settle.
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

func TestQuarantine_notBelowMaxCrashes(t *testing.T) {
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

// While suspect messages are published, no other message is in flight, so that a crash affects no other.
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

func TestStoreFaults(t *testing.T) {
	down := errors.New("connection refused")
	t.Run("claim", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.set(down, nil)
			b.write(message("k", 1))
			if _, err := b.relay.Drain(b.Context(), outbox.Bounds{}); !errors.Is(err, down) {
				b.Errorf("Drain: %v", err)
			}
			defer b.start()()
			time.Sleep(time.Minute)
			if b.relay.Ready(b.Context()) == nil {
				b.Error("Ready while the store is down")
			}
			f.set(nil, nil)
			time.Sleep(3 * time.Second) // the longest pause
			synctest.Wait()
			b.wantReceived("1")
		})
	})
	t.Run("claim, once", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.once = true
			f.set(down, nil)
			b.write(message("k", 1))
			if report := b.drain(outbox.Bounds{Limit: 1}); report.Published != 1 {
				b.Errorf("%+v", report)
			}
		})
	})
	t.Run("claim, once, whose lanes are held", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			const lanes = 16 // more than one claim takes: the next claim finds others
			f := b.wrap()
			f.once, f.held = true, true
			f.set(down, nil)
			for n := range lanes {
				b.write(message(fmt.Sprint("k", n), n))
			}
			if report := b.drain(outbox.Bounds{}); report.Published != lanes || report.Ended != "empty" {
				b.Errorf("%+v", report)
			}
		})
	})
	t.Run("settle", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.set(nil, down)
			b.write(message("k", 1), message("k", 2))
			defer b.start()()
			time.Sleep(10 * time.Second)
			f.set(nil, nil)
			time.Sleep(time.Minute)
			synctest.Wait()
			b.wantReceived("1", "2") // settled late, but not published twice
		})
	})
	t.Run("settle too late", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.set(nil, down)
			b.write(message("k", 1), message("k", 2))
			defer b.start()()
			time.Sleep(40 * time.Second)
			f.set(nil, nil)
			time.Sleep(time.Minute)
			synctest.Wait()
			got := bodies(b.publisher.Received())
			if len(got) < 4 || !slices.Equal(got[:4], []string{"1", "2", "1", "2"}) || len(b.store.Pending()) != 0 {
				b.Errorf("received %v, left %d", got, len(b.store.Pending()))
			}
		})
	})
}

// fullDisk is a Source that cannot record failures while it is full.
type fullDisk struct {
	driver.Source
	full atomic.Bool
}

func newFullDisk(source driver.Source) *fullDisk {
	s := &fullDisk{Source: source}
	s.full.Store(true)
	return s
}

var errDiskFull = errors.New("no space left on device")

func (s *fullDisk) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) (driver.Settled, error) {
	failed := func(o driver.Settlement) bool { return o.Verdict != driver.Published }
	if s.full.Load() && slices.ContainsFunc(outcomes, failed) {
		return driver.Settled{}, errDiskFull
	}
	return s.Source.Settle(ctx, b, outcomes)
}

// If a store cannot record failures, published messages are still settled, and the failed messages do not become
// suspects. The relay retries the failed messages, but not in a hot loop.
func TestFailuresThatCannotBeRecorded(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		disk := newFullDisk(b.store)
		b.over(disk, outbox.RelayConfig{})
		var attempts atomic.Int64
		b.publisher.Respond(func(m driver.Message) error {
			if m.Key == "bad" {
				attempts.Add(1)
				return &driver.PublishError{Class: driver.Permanent, Err: errors.New("refused")}
			}
			return nil
		})
		b.write(message("bad", 0), message("good", 1), message("", 2))
		stop := b.start()
		time.Sleep(10 * time.Second)
		b.wantReceived("1", "2")
		if len(b.store.Pending()) != 1 || b.store.Pending()[0].Attempts != 0 || len(b.dead()) != 0 {
			b.Errorf("left %+v, dead letters %+v", b.store.Pending(), b.dead())
		}
		if err := b.relay.Ready(b.Context()); err == nil || !strings.Contains(err.Error(), "no space left") {
			b.Errorf("Ready: %v", err)
		}
		if n := attempts.Load(); n < 2 || n > 40 {
			b.Errorf("%d attempts in 10 s", n)
		}
		disk.full.Store(false)
		time.Sleep(5 * time.Second)
		stop()
		if dead := b.dead(); len(dead) != 1 || dead[0].Class != string(driver.Permanent) || dead[0].Attempts != 1 {
			b.Errorf("dead letters %+v", dead)
		}
	})
}

// A relay that cannot settle is not lost, however often it fails. Its messages do not become suspects.
func TestRelay_failedSettlementsMakeNoSuspects(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		s := &refusing{Source: b.store}
		b.over(s, outbox.RelayConfig{})
		b.write(message("k", 0), message("k", 1))
		defer b.start()()
		time.Sleep(10 * time.Minute)
		if s.suspected.Load() {
			b.Error("a message became a suspect")
		}
	})
}

// refusing is a Source that records no outcome.
type refusing struct {
	driver.Source
	suspected atomic.Bool
}

func (s *refusing) Claim(ctx context.Context, req driver.Claim) (driver.Batch, error) {
	b, err := s.Source.Claim(ctx, req)
	if b.Suspect {
		s.suspected.Store(true)
	}
	return b, err
}

func (s *refusing) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) (driver.Settled, error) {
	if len(outcomes) > 0 {
		return driver.Settled{}, errDiskFull
	}
	return s.Source.Settle(ctx, b, outcomes)
}

// A Drain returns an error if the store cannot record failures.
func TestDrain_returnsErrorOnFullDisk(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.over(newFullDisk(b.store), outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler)})
		b.publisher.Respond(func(m driver.Message) error {
			if m.Key == "bad" {
				return errors.New("refused")
			}
			return nil
		})
		b.write(message("bad", 0), message("good", 1))
		report, err := b.relay.Drain(b.Context(), outbox.Bounds{})
		if !errors.Is(err, errDiskFull) || report.Published != 1 || report.Failed != 0 {
			b.Errorf("report %+v, %v", report, err)
		}
	})
}
