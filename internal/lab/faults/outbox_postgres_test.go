package faults_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Postgres is shut down in the fast way, and dies, under load: writers and relays lose it in the
// middle of whatever they do, commits with an outcome that nobody hears included.
func TestOutboxPostgresRestarts(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	server := testenv.Private(t, testenv.Postgres)
	s := newStore(t, server.URL())
	l := newLedger()
	c := consume(t, amqptest.New(t).URL, l)
	job := relayJob{Database: s.url, Broker: c.url, Patience: time.Second, MaxAttempts: 10}
	const relays = 2
	var ends []func()
	for range relays {
		ends = append(ends, job.start(t))
	}
	stop := s.startLoad(l, rng, 15*time.Millisecond)

	restarts := scaled(t, 4)
	for i := range restarts {
		l.untilMore(t, 100)
		time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond)
		name, end := "fast", server.Stop
		if i%2 == 1 {
			name, end = "immediate", server.Kill
		}
		began, repeats := time.Now(), l.repeats()
		must(t, end())
		time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond)
		must(t, server.Start(t.Context()))
		l.untilMore(t, 100)
		t.Logf("%-10s %5.1f s, %d repeats", name, time.Since(began).Seconds(), l.repeats()-repeats)
	}
	stop()
	deeds := s.settle(l)
	for _, end := range ends {
		end()
	}
	c.untilDrained(t)
	judge(t, l, deeds, bounds{duplicates: restarts * relays * inFlight, depth: batch})
	s.noDeadLetters()
}
