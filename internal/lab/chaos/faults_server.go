package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	goredis "github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// eachServer returns a fault for each server, or the primary at that time.
func (d *dealer) eachServer(what string, begin, end func(ctx context.Context, s *testenv.Server) error) []fault {
	var all []fault
	for _, kind := range d.s.kinds() {
		all = append(all, d.fault(string(kind)+what,
			func(ctx context.Context) error { return begin(ctx, d.s.server(kind)) },
			func(ctx context.Context) error { return end(ctx, d.s.server(kind)) }))
	}
	return all
}

func (s *system) kinds() []testenv.Kind {
	return []testenv.Kind{testenv.Postgres, testenv.Redis, s.broker.Kind()}
}

func (s *system) server(kind testenv.Kind) *testenv.Server {
	switch kind {
	case testenv.Postgres:
		return s.db.server()
	case testenv.Redis:
		return s.redis.server()
	default:
		return s.broker
	}
}

func killServer(_ context.Context, s *testenv.Server) error { return s.Kill() }

func stopServer(_ context.Context, s *testenv.Server) error { return s.Stop() }

func startServer(ctx context.Context, s *testenv.Server) error { return s.Start(ctx) }

func pauseServer(_ context.Context, s *testenv.Server) error { return s.Pause() }

func resumeServer(_ context.Context, s *testenv.Server) error { return s.Resume() }

func (d *dealer) serverKills() []fault {
	return forgetful(d.eachServer(" killed", killServer, startServer))
}

// forgetful marks the fault of Redis as one that loses the memory.
func forgetful(servers []fault) []fault {
	for i, f := range servers {
		if strings.HasPrefix(f.target, string(testenv.Redis)+" ") {
			servers[i].forgets = 1
		}
	}
	return servers
}

func (d *dealer) serverStops() []fault { return d.eachServer(" stopped", pauseServer, resumeServer) }

func (d *dealer) kills() []fault {
	return slices.Concat(d.processKills(), d.killedInHand(), d.serverKills(), d.toStandbys(" killed", killServer, startServer))
}

func (d *dealer) stops() []fault {
	return slices.Concat(d.processStops(), d.serverStops(), d.toStandbys(" stopped", pauseServer, resumeServer))
}

func (d *dealer) restarts() []fault {
	servers := slices.Concat(forgetful(d.eachServer(" restarted", stopServer, startServer)), d.toStandbys(" restarted", stopServer, startServer))
	for i := range servers {
		servers[i].lasts = 0
	}
	return slices.Concat(d.processRestarts(), servers, d.endingWithout())
}

// endingWithout asks all processes to end while a server is stopped.
func (d *dealer) endingWithout() []fault {
	kind := pick(d.rng, d.s.kinds())
	return []fault{{
		target: "every process restarted while " + string(kind) + " is stopped",
		begin: func(context.Context) error {
			if err := d.s.server(kind).Pause(); err != nil {
				return err
			}
			return d.s.terminate(d.s.processes...)
		},
		end: func(context.Context) error {
			return errors.Join(d.s.server(kind).Resume(), d.s.replace(d.s.processes...))
		},
	}}
}

// memoryAlarms raises RabbitMQ's memory alarm.
func (d *dealer) memoryAlarms() []fault {
	if d.s.broker.Kind() != testenv.RabbitMQ {
		return nil
	}
	limit := func(bytes string) func(context.Context) error {
		return func(ctx context.Context) error {
			return d.s.broker.Control(ctx, "set_vm_memory_high_watermark", "absolute", bytes)
		}
	}
	return []fault{d.fault("rabbitmq", limit("1"), limit("1GB"))}
}

// noDisk returns the reason why Postgres' disk cannot be filled here.
func noDisk() (what, why string) {
	if canMount() {
		return "", ""
	}
	return string(testenv.Postgres), "only root can mount a disk, and only on Linux"
}

// fullDisks fills the disk of Postgres, and raises RabbitMQ's disk alarm.
func (d *dealer) fullDisks() []fault {
	limit := func(bytes string) func(context.Context) error {
		return func(ctx context.Context) error { return d.s.broker.Control(ctx, "set_disk_free_limit", bytes) }
	}
	var all []fault
	if d.s.broker.Kind() == testenv.RabbitMQ {
		all = append(all, d.fault("rabbitmq", limit("900000GB"), limit("50MB")))
	}
	if canMount() {
		all = append(all, d.fault("postgres",
			func(context.Context) error { return fill(d.s.db.disk) },
			func(ctx context.Context) error {
				return errors.Join(relieve(d.s.db.disk), d.s.db.server().Start(ctx)) // it may have shut down
			}))
	}
	return all
}

func (d *dealer) flushes() []fault {
	return []fault{{target: "redis", forgets: 1, begin: func(ctx context.Context) error {
		return d.s.onRedis(ctx, func(c *goredis.Client) error { return c.FlushAll(ctx).Err() })
	}}}
}

// readOnly makes the primaries reject writes.
func (d *dealer) readOnly() []fault {
	follow := func(host, port string) func(context.Context) error {
		return func(ctx context.Context) error {
			return d.s.onRedis(ctx, func(c *goredis.Client) error { return c.ReplicaOf(ctx, host, port).Err() })
		}
	}
	set := func(sql string) func(context.Context) error {
		return func(ctx context.Context) error {
			return d.s.onPostgres(ctx, sql, "select pg_reload_conf()")
		}
	}
	return []fault{
		d.fault("redis", follow("127.0.0.1", "1"), follow("NO", "ONE")), // nothing listens there
		d.fault("postgres", set("alter system set default_transaction_read_only = on"), set("alter system reset default_transaction_read_only")),
	}
}

// onRedis runs do on the primary.
func (s *system) onRedis(ctx context.Context, do func(*goredis.Client) error) error {
	opts, err := goredis.ParseURL(s.redis.server().URL())
	if err != nil {
		return err
	}
	client := goredis.NewClient(opts)
	return errors.Join(do(client), client.Close())
}

// onPostgres runs statements on the primary, one after the other.
func (s *system) onPostgres(ctx context.Context, statements ...string) error {
	conn, err := pgx.Connect(ctx, s.db.server().URL())
	if err != nil {
		return err
	}
	for _, sql := range statements {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return errors.Join(err, conn.Close(ctx))
		}
	}
	return conn.Close(ctx)
}

// locks locks a table that every role writes, in another session.
func (d *dealer) locks() []fault {
	var all []fault
	for _, table := range []string{"reservations", "holdfast_outbox"} {
		release := func(context.Context) error { return nil }
		all = append(all, d.fault(table,
			func(ctx context.Context) error {
				tx, err := d.s.pool.Begin(ctx)
				if err != nil {
					return err
				}
				release = tx.Rollback
				_, err = tx.Exec(ctx, "lock table "+table+" in access exclusive mode")
				return err
			},
			func(ctx context.Context) error { return release(ctx) }))
	}
	return all
}

func noClocks() string {
	if fakeTime() == "" {
		return "libfaketime is not installed (Debian's package libfaketime)"
	}
	return ""
}

// clocks makes the clock of a server jump forward or back, stay there, and return to the right time.
func (d *dealer) clocks() []fault {
	var all []fault
	for _, p := range []*pair{d.s.db, d.s.redis} {
		forgets := 0
		if p.spec.Kind == testenv.Redis {
			forgets = 2 // the first jump passes the limits' windows, and a third window may start before the second jump
		}
		for _, wrong := range []time.Duration{time.Duration(5+d.rng.IntN(60)) * time.Second, -time.Duration(3+d.rng.IntN(12)) * time.Second} {
			all = append(all, fault{
				target: fmt.Sprintf("%s %+.0f s, and right again", p.spec.Kind, wrong.Seconds()),
				begin:  func(ctx context.Context) error { return p.jump(ctx, wrong) },
				lasts:  d.some(), forgets: forgets,
				end: func(ctx context.Context) error { return p.jump(ctx, 0) },
			})
		}
	}
	return all
}

// jump sets the clock and returns when every process of the servers has seen it. libfaketime reads the file again when whole
// seconds have passed by more than its cache duration, which may take two seconds.
func (p *pair) jump(ctx context.Context, wrong time.Duration) error {
	if err := p.setClock(wrong); err != nil {
		return err
	}
	return runloop.Sleep(ctx, 2200*time.Millisecond)
}

// underLoad is how long clients run before a primary is killed.
const underLoad = time.Second

// failovers kill a primary and promote its standby. The standby of Postgres has everything that was committed.
func (d *dealer) failovers() []fault {
	down := time.Duration(d.rng.IntN(3000)) * time.Millisecond
	return []fault{
		{
			target: "postgres, synchronous",
			begin: func(ctx context.Context) error {
				if err := d.s.db.replicateSynchronously(ctx); err != nil {
					return err
				}
				if err := runloop.Sleep(ctx, underLoad); err != nil {
					return err
				}
				return d.s.db.server().Kill()
			},
			lasts: down,
			end: func(ctx context.Context) error {
				old, err := d.s.db.failOver(ctx)
				if err != nil {
					return err
				}
				return old.Close()
			},
			after: func(ctx context.Context) error { return d.s.db.addStandby(ctx) },
		},
		{
			target: "redis", forgets: 1,
			begin: func(context.Context) error { return d.s.redis.server().Kill() },
			lasts: down,
			end: func(ctx context.Context) error {
				old, err := d.s.redis.failOver(ctx)
				if err != nil {
					return err
				}
				return old.Close()
			},
			after: func(ctx context.Context) error { return d.s.redis.addStandby(ctx) },
		},
	}
}

// asyncFailovers promote a standby that is behind. The lost changes are read from the disk of the old primary.
func (d *dealer) asyncFailovers() []fault {
	var old *testenv.Server
	return []fault{{
		target: "postgres, asynchronous",
		begin: func(ctx context.Context) error {
			d.s.db.replication.Pause()
			if err := runloop.Sleep(ctx, underLoad); err != nil {
				return err
			}
			return d.s.db.server().Kill()
		},
		lasts: time.Duration(d.rng.IntN(3000)) * time.Millisecond,
		end: func(ctx context.Context) (err error) {
			old, err = d.s.db.failOver(ctx)
			return err
		},
		after: func(ctx context.Context) error {
			if err := d.s.noteLost(ctx, old); err != nil {
				return err
			}
			return errors.Join(old.Close(), d.s.db.addStandby(ctx))
		},
	}}
}

// replicateSynchronously makes every commit wait for the standby. The setting belongs to the current primary.
func (p *pair) replicateSynchronously(ctx context.Context) error {
	if err := p.s.onPostgres(ctx, "alter system set synchronous_standby_names = '*'", "select pg_reload_conf()"); err != nil {
		return err
	}
	return p.await(ctx, "select count(*) from pg_stat_replication where sync_state = 'sync'", "no standby is synchronous")
}

// noteLost starts the old primary once more, isolated, and records the changes that the new one lacks.
func (s *system) noteLost(ctx context.Context, old *testenv.Server) error {
	if err := old.Start(ctx); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, old.URL())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	had, err := harness.Changes(ctx, conn)
	if err != nil {
		return err
	}
	// The new primary may be read later than the old one stopped: additional changes do no harm.
	var has []audit.Change
	err = harness.Poll(ctx, func(ctx context.Context) (err error) {
		has, err = harness.Changes(ctx, s.pool)
		return err
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost = append(s.lost, harness.LostOf(had, has)...)
	return nil
}

// losses returns the changes that failovers have lost.
func (s *system) losses() []audit.Change {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// toStandbys returns a fault for each standby. While a synchronous standby is away, every commit waits: clients get no
// answer, and everything continues when it is back. Nothing waits for the two other standbys: the shop must not notice, and
// they must follow again, so that a failover can use them.
func (d *dealer) toStandbys(what string, away func(context.Context, *testenv.Server) error, back func(context.Context, *testenv.Server) error) []fault {
	of := func(p *pair) fault {
		return d.fault("",
			func(ctx context.Context) error { return away(ctx, p.follower()) },
			func(ctx context.Context) error { return back(ctx, p.follower()) })
	}
	replica, asynchronous, synchronous := of(d.s.redis), of(d.s.db), of(d.s.db)
	replica.target, replica.after = "replica of redis"+what, d.s.redis.replicaFollows
	asynchronous.target, asynchronous.after = "asynchronous standby of postgres"+what, d.s.db.standbyFollows
	synchronous.target = "synchronous standby of postgres" + what
	leave := synchronous.begin
	synchronous.begin = func(ctx context.Context) error {
		if err := d.s.db.replicateSynchronously(ctx); err != nil {
			return err
		}
		if err := leave(ctx); err != nil {
			return err
		}
		return d.s.db.await(ctx, "select count(*) from pg_stat_activity where wait_event = 'SyncRep'", "no commit waits for the standby")
	}
	// Wait for the standby first: commits must continue because it returned, not because of this setting.
	synchronous.after = func(ctx context.Context) error {
		if err := d.s.db.standbyFollows(ctx); err != nil {
			return err
		}
		return d.s.onPostgres(ctx, "alter system reset synchronous_standby_names", "select pg_reload_conf()")
	}
	return []fault{replica, asynchronous, synchronous}
}

// standbyFollows returns when the standby of Postgres receives its primary's changes.
func (p *pair) standbyFollows(ctx context.Context) error {
	return p.await(ctx, "select count(*) from pg_stat_replication where state = 'streaming'", "the standby does not follow")
}

// await returns when a count on the primary of Postgres is above 0.
func (p *pair) await(ctx context.Context, sql, otherwise string) error {
	ctx, cancel := context.WithTimeout(ctx, testenv.Patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, p.server().URL())
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return harness.Poll(ctx, func(ctx context.Context) error {
		var n int
		if err := conn.QueryRow(ctx, sql).Scan(&n); err != nil {
			return fmt.Errorf("%s: %w", otherwise, err)
		}
		if n == 0 {
			return errors.New(otherwise)
		}
		return nil
	})
}

// replicaFollows returns when the replica of Redis receives its primary's changes.
func (p *pair) replicaFollows(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, testenv.Patience)
	defer cancel()
	opts, err := goredis.ParseURL(p.follower().URL())
	if err != nil {
		return err
	}
	client := goredis.NewClient(opts)
	err = harness.Poll(ctx, func(ctx context.Context) error {
		info, err := client.Info(ctx, "replication").Result()
		if err != nil || !strings.Contains(info, "master_link_status:up") {
			return errors.Join(errors.New("the replica does not follow"), err)
		}
		return nil
	})
	return errors.Join(err, client.Close())
}
