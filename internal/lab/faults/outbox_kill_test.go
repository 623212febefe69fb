package faults_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Two relays work, and one after the other is killed at whatever it is doing.
func TestOutboxRelayKilled(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	s := newStore(t, pgtest.URL(t))
	l := ledger.New()
	c := consume(t, amqptest.New(t).URL, l)
	job := relayJob{Database: s.url, Broker: c.URL, Patience: time.Second, MaxAttempts: 10}
	relays := []*child{spawn(t, "relay", job), spawn(t, "relay", job)}
	stop := s.startLoad(l, rng, 40*time.Millisecond)

	kills := scaled(t, 10)
	for range kills {
		i := rng.IntN(len(relays))
		if rng.IntN(4) > 0 { // else it may be killed at its start
			relays[i].awaitReady()
			untilMore(t, l, 1)
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

// takeover is within what time the lanes of a relay that was killed are another one's. A short
// run shares its processors.
const takeover, takeoverBeside = 10 * time.Second, 20 * time.Second

// A relay with the defaults holds lanes, since its broker is silent, and is killed before it has
// noticed that and given them back. Another one, once it runs, publishes what was held within 10 s.
func TestOutboxKilledRelayIsReplaced(t *testing.T) {
	t.Parallel()
	s := newStore(t, pgtest.URL(t))
	l := ledger.New()
	c := consume(t, amqptest.New(t).URL, l)
	most := takeover
	if !long(t) {
		most = takeoverBeside
	}
	testenv.InTime(t, most, func() time.Duration {
		silent := testenv.NewProxy(t, c.URL)
		first := spawn(t, "relay", relayJob{Database: s.url, Broker: silent.URL()})
		first.awaitReady()
		s.fill(64)
		s.untilEmpty(patience)
		silent.Pause()
		s.fill(64)
		untilTrue(t, "the relay holds lanes", func() bool { return len(s.lanes()) > 0 })
		held := len(s.lanes())
		first.kill()
		second := spawn(t, "relay", relayJob{Database: s.url, Broker: c.URL})
		second.awaitReady()
		began := time.Now()
		s.untilEmpty(patience)
		took := time.Since(began)
		t.Logf("%d lanes of a relay that was killed were another one's after %v", held, took)
		second.end(&relayReport{})
		return took
	})
	s.noDeadLetters()
}
