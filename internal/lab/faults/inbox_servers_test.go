package faults_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// fault is something that happens to a server.
type fault struct {
	name string
	do   func()
}

// suffer has everything happen, in any order, while messages come and go.
func (i *intake) suffer(rng *rand.Rand, faults []fault) {
	i.t.Helper()
	stop := i.start()
	for range scaled(i.t, 1) {
		rng.Shuffle(len(faults), func(a, b int) { faults[a], faults[b] = faults[b], faults[a] })
		for _, f := range faults {
			must(i.t, i.send(mix(100, rng)...))
			began := time.Now()
			f.do()
			testenv.Eventually(i.t, func() error { return i.send(mix(20, rng)...) })
			i.settle()
			i.t.Logf("%-18s %5.1f s", f.name, time.Since(began).Seconds())
		}
	}
	stop()
	i.audit()
	i.noneDead()
}

// Whatever happens to the broker, each message takes effect once, and none is blamed.
func TestInboxBrokerFaults(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	server := testenv.Private(t, testenv.RabbitMQ)
	i := newIntake(t, inboxJob{Database: pgtest.URL(t), Broker: server.URL(), Concurrency: 4, Batch: 5})
	must(t, server.WriteDefinitions(t.Context()))
	soon := func() { time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond) }
	i.suffer(rng, []fault{
		{"restarted", func() {
			soon()
			must(t, server.Restart(t.Context()))
		}},
		{"killed", func() {
			soon()
			must(t, server.Kill())
			must(t, server.Start(t.Context()))
		}},
		{"frozen", func() {
			soon()
			must(t, server.Pause())
			time.Sleep(5 * time.Second) // longer than two heartbeats
			must(t, server.Resume())
		}},
		{"connections closed", func() {
			soon()
			closeConnections(t, server.AdminURL())
		}},
		{"queue deleted", func() {
			i.settle() // a deleted queue takes its messages along
			must(t, ledger.OnBroker(t.Context(), i.job.Broker, func(ch *amqp.Channel) error {
				_, err := ch.QueueDelete(inboxQueue, false, false, false)
				return err
			}))
			// RabbitMQ 3.10 can lose the way to a consumer of a quorum queue that is declared again at once: it
			// counts messages as delivered that it never sends.
			time.Sleep(2 * time.Second)
			must(t, i.setup(t.Context()))
			must(t, server.WriteDefinitions(t.Context()))
		}},
	})
}

// Whatever happens to the database, too.
func TestInboxPostgresFaults(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	server := testenv.Private(t, testenv.Postgres)
	i := newIntake(t, inboxJob{Database: server.URL(), Broker: amqptest.New(t).URL, Concurrency: 4, Batch: 5})
	soon := func() { time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond) }
	again := func(end func() error) func() {
		return func() {
			soon()
			must(t, end())
			time.Sleep(time.Duration(rng.IntN(1500)) * time.Millisecond)
			must(t, server.Start(t.Context()))
		}
	}
	i.suffer(rng, []fault{
		{"shut down", again(server.Stop)},
		{"killed", again(server.Kill)},
		{"frozen", func() {
			soon()
			must(t, server.Pause())
			time.Sleep(2 * time.Second)
			must(t, server.Resume())
		}},
		{"backends ended", func() {
			for range 5 {
				soon()
				conn, err := pgx.Connect(t.Context(), server.URL())
				must(t, err)
				_, err = conn.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()`)
				must(t, err)
				must(t, conn.Close(t.Context()))
			}
		}},
	})
}
