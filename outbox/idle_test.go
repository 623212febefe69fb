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

// A relay that hears of commits looks seldom by itself.
func TestIdleRelayLooksSeldom(t *testing.T) {
	for hears, want := range map[bool]int64{false: 61, true: 13} {
		t.Run(strconv.FormatBool(hears), func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{}, func(b *bench) {
				w := &watched{Source: b.store, hears: hears}
				b.over(w, outbox.RelayConfig{})
				defer b.start()()
				time.Sleep(time.Minute)
				synctest.Wait()
				if got := w.claims.Load(); got != want {
					b.Errorf("%d looks in a minute, want %d", got, want)
				}
			})
		})
	}
}

// Messages without a wake-up, such as those of other programs, have it look more often, until there are none for
// a while.
func TestUntoldMessagesAreLookedFor(t *testing.T) {
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

// What is committed while its lane is leased is published when the batch has been: whoever was woken for it has found
// nothing. Without such a message there is no further claim.
func TestWhatComesMeanwhile(t *testing.T) {
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
			b.Errorf("%d claims, and there was nothing more to find", got)
		}
	})
}

// The lanes of a relay that was killed are taken over when its lease ends, however seldom others look.
func TestLanesOfTheKilledAreTakenOver(t *testing.T) {
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

// Wake-ups may have been refused for the sake of a transport that is paused: then the relay looks as often as one that
// hears of nothing.
func TestPausedTransportIsNoReasonToLookSeldom(t *testing.T) {
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
		time.Sleep(5100 * time.Millisecond) // a poll has just ended, and any longer one with it
		b.write(message("b", 2))
		time.Sleep(time.Second)
		synctest.Wait()
		b.wantReceived("2")
	})
}

// waking is a watched Source that counts how often it is asked to wake a relay.
type waking struct {
	watched
	wakes atomic.Int64
}

func (w *waking) Wake() { w.wakes.Add(1) }

// A relay that ends tells another of what came to its lanes meanwhile: whoever was woken for it has found nothing.
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
