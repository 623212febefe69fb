package faults_test

import (
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The network between the relays and either server fails in every way, for longer than the relays
// wait: reset and refused, silent, and with all that is answered swallowed. Some relays are ended in
// the middle of that, which takes no longer than they say.
func TestOutboxNetworkFaults(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	s := newStore(t, pgtest.URL(t))
	l := ledger.New()
	c := consume(t, amqptest.New(t).URL, l)
	database, broker := testenv.NewProxy(t, s.url), testenv.NewProxy(t, c.URL)
	job := relayJob{Database: database.URL(), Broker: broker.URL(), Patience: time.Second, MaxAttempts: 10}
	const relays = 2
	var ends []func()
	for range relays {
		ends = append(ends, job.start(t))
	}
	stop := s.startLoad(l, rng, 120*time.Millisecond)

	both := func(do func(*testenv.Proxy)) func() {
		return func() {
			do(broker)
			do(database)
		}
	}
	healed := both((*testenv.Proxy).Heal)
	faults := []struct {
		name     string
		do, heal func()
	}{
		{"broker cut", broker.Cut, broker.Heal},
		{"broker silent", broker.Pause, broker.Heal},
		{"broker unheard", broker.DropReplies, broker.Heal},
		{"database cut", database.Cut, database.Heal},
		{"database silent", database.Pause, database.Heal},
		{"database unheard", database.DropReplies, database.Heal},
		{"both cut", both((*testenv.Proxy).Cut), healed},
		{"both silent", both((*testenv.Proxy).Pause), healed},
		{"both unheard", both((*testenv.Proxy).DropReplies), healed},
	}
	outages := 0
	for range scaled(t, 1) {
		rng.Shuffle(len(faults), func(i, k int) { faults[i], faults[k] = faults[k], faults[i] })
		for _, fault := range faults {
			untilMore(t, l, 100)
			repeats := l.Repeats()
			began := time.Now()
			fault.do()
			time.Sleep(time.Duration(rng.IntN(2000)) * time.Millisecond)
			var ending sync.WaitGroup
			i := rng.IntN(2 * relays)
			if i < relays {
				ending.Go(ends[i])
				time.Sleep(job.shutdown() + 100*time.Millisecond) // its pool takes longer, if nobody answers
			}
			fault.heal()
			ending.Wait()
			if i < relays {
				ends[i] = job.start(t)
			}
			untilMore(t, l, 100)
			t.Logf("%-18s %5.1f s, %d repeats", fault.name, time.Since(began).Seconds(), l.Repeats()-repeats)
			outages++
		}
	}
	stop()
	deeds := s.settle(l)
	for _, end := range ends {
		end()
	}
	c.untilDrained(t)
	judge(t, l, deeds, bounds{duplicates: outages * relays * inFlight, depth: batch})
	s.noDeadLetters()
}
