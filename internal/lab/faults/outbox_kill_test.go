package faults_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// Two relays work, and one after the other is killed at whatever it is doing.
func TestOutboxRelayKilled(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	s := newStore(t, pgtest.URL(t))
	l := newLedger()
	c := consume(t, amqptest.New(t).URL, l)
	job := relayJob{Database: s.url, Broker: c.url, Patience: time.Second, MaxAttempts: 10}
	relays := []*child{spawn(t, "relay", job), spawn(t, "relay", job)}
	stop := s.startLoad(l, rng, 6*time.Millisecond)

	kills := scaled(t, 10)
	for range kills {
		i := rng.IntN(len(relays))
		if rng.IntN(4) > 0 { // else it may be killed at its start
			relays[i].awaitReady()
			l.untilMore(t, 1)
		}
		time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond)
		relays[i].kill()
		relays[i] = spawn(t, "relay", job)
	}
	stop()
	deeds := s.settle(l)
	for _, r := range relays {
		r.end(&relayReport{})
	}
	c.untilDrained(t)
	t.Logf("%d kills", kills)
	judge(t, l, deeds, bounds{duplicates: kills * inFlight, depth: batch})
	s.noDeadLetters()
}
