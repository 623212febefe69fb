package faults_test

import (
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The tests of this room run the reservation example as processes, let each kind of fault happen
// under load, and measure how long it takes from the fault's end until every process is ready, every
// api answers for every event, and all that had happened by then is published, consumed and, where it
// was due, expired. Each test prints a table.

func TestRecoveryFromLostProcesses(t *testing.T) {
	t.Parallel()
	s := openShop(t, shop.Shared(t))
	var faults []mishap
	for _, name := range []string{"api", "relay", "consumer", "sweeper"} {
		victims := s.named(name)
		faults = append(faults,
			mishap{
				name:  name + " killed",
				begin: func(*testing.T) { victims[0].kill() },
				end:   func(*testing.T) { replace(victims[:1]) },
			},
			mishap{
				name: "every " + name + " killed", longOnly: true,
				begin: func(*testing.T) { killAll(victims) }, lasts: outage(t),
				end: func(*testing.T) { replace(victims) },
			},
			mishap{
				name: name + " stopped", longOnly: name == "consumer" || name == "sweeper",
				begin: func(*testing.T) { victims[0].signal(syscall.SIGSTOP) }, lasts: outage(t),
				end: func(*testing.T) { victims[0].signal(syscall.SIGCONT) },
			},
		)
	}
	s.sufferAll(append(faults, s.killedInTheMiddle()...)...)
}

func killAll(victims []*role) {
	for _, r := range victims {
		r.kill()
	}
}

// replace starts processes anew and does not wait until they listen.
func replace(victims []*role) {
	for _, r := range victims {
		r.start()
		go r.awaitListening()
	}
}

// killedInTheMiddle has processes killed that have messages in hand.
func (s *reservationShop) killedInTheMiddle() []mishap {
	relay, consumer := s.named("relay")[0], s.named("consumer")[0]
	return []mishap{
		{name: "relay killed with messages in hand", begin: func(*testing.T) {
			s.each(func(l links) { l.broker.Pause() }, "relay")
		}, lasts: time.Second, end: func(*testing.T) {
			relay.kill()
			s.each(func(l links) { l.broker.Resume() }, "relay")
			replace([]*role{relay})
		}},
		{name: "consumer killed with messages in hand", begin: func(*testing.T) {
			s.each(func(l links) { l.database.Pause() }, "consumer")
		}, lasts: time.Second, end: func(*testing.T) {
			consumer.kill()
			s.each(func(l links) { l.database.Resume() }, "consumer")
			replace([]*role{consumer})
		}},
	}
}

func TestRecoveryFromPostgres(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres)
	s := openShop(t, shop.Servers{Database: server.URL(), Redis: redistest.URL(t), Broker: amqptest.New(t).URL})
	faults := s.serverFaults(server, func(l links) *testenv.Proxy { return l.database }, "api", "relay", "consumer", "sweeper")
	s.sufferAll(append(faults, s.tableLocks("reservations"), s.tableLocks("holdfast_outbox"), s.diskFull())...)
}

func TestRecoveryFromRedis(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis)
	servers := shop.Shared(t)
	servers.Redis = server.URL()
	s := openShop(t, servers)
	flushed := mishap{name: "redis flushed", begin: func(t *testing.T) {
		must(t, redistest.Client(t, server.URL()).FlushAll(t.Context()).Err())
	}}
	s.sufferAll(append(s.serverFaults(server, func(l links) *testenv.Proxy { return l.redis }), flushed)...)
}

func TestRecoveryFromRabbitMQ(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.RabbitMQ)
	servers := shop.Shared(t)
	servers.Broker = server.URL()
	s := openShop(t, servers)
	s.sufferAll(s.serverFaults(server, func(l links) *testenv.Proxy { return l.broker }, "relay", "consumer")...)
}

// outage is how long a fault lasts that has an end.
func outage(t testing.TB) time.Duration {
	t.Helper()
	if long(t) {
		return 23 * time.Second
	}
	return 2 * time.Second
}

// serverFaults are those of a server and of the network before it, for all roles and then for some.
func (s *reservationShop) serverFaults(server *testenv.Server, proxy func(links) *testenv.Proxy, roles ...string) []mishap {
	name := string(server.Kind())
	all := func(do func(*testenv.Proxy), roles ...string) func(*testing.T) {
		return func(*testing.T) { s.each(func(l links) { do(proxy(l)) }, roles...) }
	}
	stop, resume := func(t *testing.T) { must(t, server.Pause()) }, func(t *testing.T) { must(t, server.Resume()) }
	kill, start := func(t *testing.T) { must(t, server.Kill()) }, func(t *testing.T) { must(t, server.Start(t.Context())) }
	silence := (*testenv.Proxy).SilenceConnections
	faults := []mishap{
		{name: name + " killed", begin: kill, lasts: outage(s.t), end: start},
		{name: name + " stopped", begin: stop, lasts: outage(s.t), end: resume, longOnly: true},
		{name: name + " cut off", begin: all((*testenv.Proxy).Cut), lasts: outage(s.t), end: all((*testenv.Proxy).Heal)},
		{name: name + " half-open", begin: all(silence)},
		{name: name + " stopped, SIGTERM to all", begin: func(t *testing.T) {
			stop(t)
			terminateAll(t, s.roles)
		}, end: func(t *testing.T) {
			resume(t)
			replace(s.roles)
		}, longOnly: server.Kind() == testenv.Postgres},
	}
	for _, role := range roles {
		faults = append(faults, mishap{name: name + " half-open of " + role, begin: all(silence, role), longOnly: role != "sweeper"})
	}
	return faults
}

// terminateAll wants every process to end by itself within what the example says.
func terminateAll(t *testing.T, roles []*role) {
	t.Helper()
	const drain, slack = 42 * time.Second, 20 * time.Second
	var all sync.WaitGroup
	for _, r := range roles {
		all.Go(func() {
			took, err := r.terminate(drain + slack)
			if err != nil {
				t.Error(err)
			}
			t.Logf("%-8s ended %.1f s after SIGTERM", r.name, took.Seconds())
		})
	}
	all.Wait()
}

// tableLocks has another session lock a table that everybody writes.
func (s *reservationShop) tableLocks(table string) mishap {
	release := func(*testing.T) {}
	return mishap{name: table + " locked", begin: func(t *testing.T) {
		ctx := s.t.Context()
		tx, err := s.db.Begin(ctx)
		must(t, err)
		_, err = tx.Exec(ctx, "lock table "+table+" in access exclusive mode")
		must(t, err)
		release = func(t *testing.T) { must(t, tx.Rollback(ctx)) }
	}, lasts: outage(s.t), end: func(t *testing.T) { release(t) }}
}

// diskFull has every new row refused as a full disk does.
func (s *reservationShop) diskFull() mishap {
	exec := func(t *testing.T, sql string) {
		t.Helper()
		_, err := s.db.Exec(s.t.Context(), sql)
		must(t, err)
	}
	tables := []string{"reservations", "holdfast_outbox", "holdfast_inbox", "holdfast_idempotency", "reservation_states"}
	return mishap{name: "disk full", begin: func(t *testing.T) {
		exec(t, `create function disk_full() returns trigger language plpgsql as
			$$ begin raise exception 'could not extend file: No space left on device' using errcode = '53100'; end $$`)
		for _, table := range tables {
			exec(t, "create trigger disk_full before insert or update on "+table+" execute function disk_full()")
		}
	}, lasts: outage(s.t), end: func(t *testing.T) { exec(t, "drop function disk_full cascade") }}
}

// sufferAll lets faults happen one after the other, in the long form once for every 100 rounds, and judges. It ends
// with the first that is not over, since the next one would be blamed for that.
func (s *reservationShop) sufferAll(faults ...mishap) {
	s.t.Helper()
	var all []recovery
	defer func() { judgeRecoveries(s.t, all) }()
	for range max(1, testenv.Rounds(s.t)/100) {
		for _, f := range faults {
			if f.longOnly && !long(s.t) {
				continue
			}
			if !s.t.Run(f.name, func(t *testing.T) { all = append(all, s.suffer(t, f)) }) {
				return
			}
		}
	}
	s.audit()
}
