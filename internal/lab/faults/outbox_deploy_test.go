package faults_test

import (
	"context"
	"encoding/json"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// deployJob is a service that writes, with a relay beside it.
type deployJob struct {
	Relay relayJob
	Seed  uint64
}

// deployReport is what a deployed service did.
type deployReport struct {
	Relay     relayReport
	Committed int // messages
}

func deployRole(ctx context.Context, job []byte, ready func()) (any, error) {
	var j deployJob
	if err := json.Unmarshal(job, &j); err != nil {
		return nil, err
	}
	pool, err := pgxpool.New(ctx, j.Relay.Database)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	l := ledger.New()
	work, err := newLoad(pool, l, j.Seed, 10*time.Millisecond)
	if err != nil {
		return nil, err
	}
	var writing sync.WaitGroup
	writing.Go(func() { err = work.Run(ctx) })
	report, failed := j.Relay.run(ctx, ready)
	writing.Wait()
	if failed != nil {
		err = failed
	}
	return deployReport{report, l.Committed()}, err
}

// A new version of a service replaces the old one, time and again, under load. Nobody dies, so
// nothing is published twice.
func TestOutboxRollingDeploy(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	s := newStore(t, pgtest.URL(t))
	l := ledger.New()
	c := consume(t, amqptest.New(t).URL, l)
	// The patience is that of production: a machine that is busy is no fault.
	job := deployJob{Relay: relayJob{Database: s.url, Broker: c.URL, Patience: 10 * time.Second, MaxAttempts: 10}}
	deploy := func() *child {
		job.Seed = rng.Uint64()
		next := spawn(t, "deploy", job)
		next.awaitReady()
		return next
	}
	var total deployReport
	retire := func(old *child) {
		var report deployReport
		old.end(&report)
		total.Committed += report.Committed
		total.Relay.Stale += report.Relay.Stale
		total.Relay.Published += report.Relay.Published
	}

	replaced := scaled(t, 4)
	services := []*child{deploy(), deploy()}
	for range replaced {
		untilMore(t, l, 1)
		next := deploy() // both are there for a while
		time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond)
		i := rng.IntN(len(services))
		retire(services[i])
		services[i] = next
	}
	last := spawn(t, "relay", job.Relay) // takes what the last writers leave
	retire(services[0])
	retire(services[1])
	deeds := s.settle(l)
	var rest relayReport
	last.end(&rest)
	c.untilDrained(t)

	t.Logf("%d services replaced", replaced)
	judge(t, l, deeds, bounds{})
	if published := total.Relay.Published + rest.Published; published != int64(len(deeds)) {
		t.Errorf("the relays tell of %d messages", published)
	}
	if total.Committed != len(deeds) {
		t.Errorf("the writers tell of %d messages", total.Committed)
	}
	if total.Relay.Stale > 0 {
		t.Errorf("%d leases ran out", total.Relay.Stale)
	}
	s.noDeadLetters()
}
