package outbox_test

import (
	"errors"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
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
		// One by one these are at least 30 batches of 10 ms each.
		if took := time.Since(begin); took > 200*time.Millisecond {
			b.Errorf("it took %v", took)
		}
		if got := len(b.publisher.Received()); got != n {
			b.Errorf("%d of %d received", got, n)
		}
	})
}

// Batches in flight count against the limit until it is known what became of them.
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

// Once it is known that a transport is silent, one batch at a time tries it, and the others go on.
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
		time.Sleep(5 * time.Second) // it is being tried again
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
