package outbox_test

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

func TestBatchesOverlap(t *testing.T) {
	inBubble(t, outbox.RelayConfig{BatchSize: 10}, func(b *bench) {
		b.publisher.Latency(10 * time.Millisecond)
		const n = 300
		for i := range n {
			b.write(message("", i))
		}
		begin := time.Now()
		b.drain(outbox.Bounds{})
		// One by one, these would be at least 30 batches of 10 ms each.
		if took := time.Since(begin); took > 200*time.Millisecond {
			b.Errorf("it took %v", took)
		}
		if got := len(b.publisher.Received()); got != n {
			b.Errorf("%d of %d received", got, n)
		}
	})
}

// Batches in flight count against the limit until their outcome is known.
func TestDrainKeepsItsLimitOverManyBatches(t *testing.T) {
	for _, limit := range []int{1, 4, 10, 11, 99} {
		t.Run(strconv.Itoa(limit), func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{BatchSize: 4}, func(b *bench) {
				b.publisher.Latency(10 * time.Millisecond)
				for i := range 100 {
					b.write(message("", i))
				}
				report := b.drain(outbox.Bounds{Limit: limit})
				if got := len(b.publisher.Received()); got != limit || report.Published != limit || report.Ended != "limit" {
					b.Errorf("received %d, reported %+v, want %d", got, report, limit)
				}
			})
		})
	}
}

// A parked message is published when it is due, not at the next poll.
func TestParkedMessageIsNotLate(t *testing.T) {
	cfg := outbox.RelayConfig{PollInterval: time.Hour, Retry: outbox.RetryPolicy{BaseDelay: 100 * time.Millisecond}, Rand: half}
	inBubble(t, cfg, func(b *bench) {
		b.publisher.Script(errors.New("once"))
		b.write(message("k", 1))
		defer b.start()()
		begin := time.Now()
		for len(b.publisher.Received()) == 0 {
			time.Sleep(time.Millisecond)
			synctest.Wait()
		}
		if took := time.Since(begin); took > 101*time.Millisecond {
			b.Errorf("it took %v, want the retry delay", took)
		}
	})
}

// After a transport was found silent, one batch at a time tries it, and the others continue.
func TestSilentTransportLeavesRoomForOthers(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.between(b.store, b.publisher, outbox.RelayConfig{Transports: map[string]driver.Publisher{"silent": silent{}}, BatchSize: 4})
		b.relay.SetPauses(200*time.Millisecond, 200*time.Millisecond)
		write := func(transport string, n int) {
			var msgs []outbox.Message
			for i := range n {
				m := message("", i)
				m.Transport = transport
				msgs = append(msgs, m)
			}
			b.write(msgs...)
		}
		write("silent", 100)
		defer b.start()()
		for stats, err := b.relay.Stats(b.Context()); stats.Transports["silent"].State == "closed"; stats, err = b.relay.Stats(b.Context()) {
			must(b, err)
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(5 * time.Second) // a batch is trying the transport again
		write("", 100)
		b.relay.Wake()
		time.Sleep(time.Second)
		synctest.Wait()
		// The batch that tries the silent transport holds its lanes.
		if got := len(b.publisher.Received()); got < 50 {
			b.Errorf("%d of 100 messages of the other transport were sent", got)
		}
	})
}

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

// watched is a Source that counts its claims. Nothing wakes its relay.
type watched struct {
	driver.Source
	claims atomic.Int64
	hears  bool
}

func (w *watched) Claim(ctx context.Context, r driver.Claim) (driver.Batch, error) {
	w.claims.Add(1)
	return w.Source.Claim(ctx, r)
}

func (w *watched) Hears() bool { return w.hears }

// A relay whose store notifies of commits polls seldom.
func TestRelay_pollsSeldomWhenIdle(t *testing.T) {
	for hears, want := range map[bool]int64{false: 61, true: 13} {
		t.Run(strconv.FormatBool(hears), func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{}, func(b *bench) {
				w := &watched{Source: b.store, hears: hears}
				b.over(w, outbox.RelayConfig{})
				defer b.start()()
				time.Sleep(time.Minute)
				synctest.Wait()
				if got := w.claims.Load(); got != want {
					b.Errorf("%d polls in a minute, want %d", got, want)
				}
			})
		})
	}
}

// Messages without a wake-up, for example from other programs, make the relay poll more often. When there have been
// none for a while, it polls seldom again.
func TestRelay_pollsOftenAfterMessagesWithoutWakeUp(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.over(&watched{Source: b.store, hears: true}, outbox.RelayConfig{})
		defer b.start()()
		late := func(n int) time.Duration {
			b.write(message("k", n))
			begin := time.Now()
			for len(b.store.Pending()) > 0 {
				time.Sleep(100 * time.Millisecond)
				synctest.Wait()
			}
			return time.Since(begin)
		}
		time.Sleep(100 * time.Millisecond)
		if took := late(1); took <= time.Second || took > 5*time.Second {
			b.Errorf("the first took %v, want up to 5 s", took)
		}
		for n := range 100 {
			if took := late(n); took > time.Second {
				b.Errorf("one of many took %v, want up to a second", took)
			}
		}
		time.Sleep(61 * time.Second)
		if took := late(1); took <= time.Second || took > 5*time.Second {
			b.Errorf("the first after a while took %v, want up to 5 s", took)
		}
	})
}

// A message committed while its lane is leased is published after the batch, because its wake-up found nothing to
// claim. Without such a message there is no further claim.
func TestRelay_claimsMessagesCommittedDuringBatch(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		w := &watched{Source: b.store, hears: true}
		b.over(w, outbox.RelayConfig{})
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
			b.Errorf("%d claims although no message was left", got)
		}
	})
}

// A relay takes over the lanes of a killed relay when their lease expires, even if it polls seldom.
func TestRelay_takesOverLanesOfKilledRelay(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.over(&watched{Source: b.store, hears: true}, outbox.RelayConfig{})
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

// While a transport is paused, the relay may have rejected wake-ups because of it. It therefore polls as often as a
// relay without notifications.
func TestRelay_pollsOftenWhileTransportPaused(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		down := outboxtest.NewPublisher()
		down.Respond(func(driver.Message) error {
			return &driver.PublishError{Class: driver.Unavailable, Err: errors.New("on purpose")}
		})
		b.over(&watched{Source: b.store, hears: true}, outbox.RelayConfig{Transports: map[string]driver.Publisher{"down": down}})
		b.relay.SetPauses(time.Hour, time.Hour)
		m := message("a", 1)
		m.Transport = "down"
		b.write(m)
		defer b.start()()
		time.Sleep(5100 * time.Millisecond) // a poll has just ended, also one with the longer interval
		b.write(message("b", 2))
		time.Sleep(time.Second)
		synctest.Wait()
		b.wantReceived("2")
	})
}

// waking is a watched Source that counts the calls of Wake.
type waking struct {
	watched
	wakes atomic.Int64
}

func (w *waking) Wake() { w.wakes.Add(1) }

// A relay that shuts down wakes another one if a message was committed to its lanes meanwhile, because that message's
// wake-up found nothing to claim.
func TestRelayThatEndsWakesAnother(t *testing.T) {
	for left, want := range map[bool]int64{false: 0, true: 1} {
		t.Run(strconv.FormatBool(left), func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{}, func(b *bench) {
				w := &waking{watched: watched{Source: b.store, hears: true}}
				b.over(w, outbox.RelayConfig{})
				b.publisher.Latency(100 * time.Millisecond)
				b.write(message("k", 1))
				stop := b.start()
				time.Sleep(50 * time.Millisecond)
				if left {
					b.write(message("k", 2))
				}
				stop()
				b.wantReceived("1")
				if got := w.wakes.Load(); got != want {
					b.Errorf("another relay was woken %d times, want %d", got, want)
				}
			})
		})
	}
}
