package outbox_test

import (
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

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
