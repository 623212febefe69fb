package faults_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// database is a Postgres to break.
type database struct {
	*testenv.Server
	*store
	rng *rand.Rand
}

// Everything happens to a Postgres under load: writers and relays lose it in the middle of whatever
// they do, commits with an outcome that nobody hears included.
func TestOutboxPostgresFaults(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	server := testenv.Private(t, testenv.Postgres)
	d := &database{server, newStore(t, server.URL()), rng}
	l := ledger.New()
	c := consume(t, amqptest.New(t).URL, l)
	job := relayJob{Database: d.url, Broker: c.URL, Patience: time.Second, MaxAttempts: 10}
	const relays = 2
	var ends []func()
	for range relays {
		ends = append(ends, job.start(t))
	}
	stop := d.startLoad(l, rng, 120*time.Millisecond)

	faults := []struct {
		name string
		do   func()
	}{
		{"shut down", func() { d.restart(server.Stop) }},
		{"killed", func() { d.restart(server.Kill) }},
		{"frozen", d.frozen},
		{"backends ended", d.backendsEnded},
		{"table locked", d.tableLocked},
	}
	done := 0
	for range scaled(t, 1) {
		rng.Shuffle(len(faults), func(i, k int) { faults[i], faults[k] = faults[k], faults[i] })
		for _, fault := range faults {
			untilMore(t, l, 100)
			began, repeats := time.Now(), l.Repeats()
			fault.do()
			untilMore(t, l, 100)
			t.Logf("%-15s %5.1f s, %d repeats", fault.name, time.Since(began).Seconds(), l.Repeats()-repeats)
			done++
		}
	}
	stop()
	deeds := d.settle(l)
	for _, end := range ends {
		end()
	}
	c.untilDrained(t)
	judge(t, l, deeds, bounds{duplicates: done * relays * inFlight, depth: batch})
	d.noDeadLetters()
}

func (d *database) restart(end func() error) {
	time.Sleep(time.Duration(d.rng.IntN(300)) * time.Millisecond)
	must(d.t, end())
	time.Sleep(time.Duration(d.rng.IntN(500)) * time.Millisecond)
	must(d.t, d.Start(d.t.Context()))
}

// frozen: for longer than the relays wait for a reply, and than their leases.
func (d *database) frozen() {
	must(d.t, d.Pause())
	time.Sleep(2500 * time.Millisecond)
	must(d.t, d.Resume())
}

func (d *database) backendsEnded() {
	conn, err := pgx.Connect(d.t.Context(), d.url)
	must(d.t, err)
	_, err = conn.Exec(d.t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()`)
	must(d.t, err)
	must(d.t, conn.Close(d.t.Context()))
}

// tableLocked: by somebody who alters it, for longer than the leases.
func (d *database) tableLocked() {
	conn, err := pgx.Connect(d.t.Context(), d.url)
	must(d.t, err)
	_, err = conn.Exec(d.t.Context(), `BEGIN; LOCK TABLE holdfast_outbox`)
	must(d.t, err)
	time.Sleep(2500 * time.Millisecond)
	must(d.t, conn.Close(d.t.Context()))
}
