package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	// hold is how long the shop holds a seat.
	hold = 2 * time.Second
	// giveUp is how long a recovery may take. The report marks a recovery above the goal.
	giveUp = 3 * time.Minute
)

// trial is the shop on the clusters, with customers.
type trial struct {
	house     *house
	processes shop.Roles
	apis      []string
	db        *pgxpool.Pool
	watch     *harness.Watch
	// poolers restarts PgBouncers that have ended by themselves.
	poolers *supervisor
}

// openTrial starts an api, a relay, a consumer and a sweeper on each app host.
func openTrial(ctx context.Context, h *house, binary string) (*trial, error) {
	t := &trial{house: h}
	var names []string
	for _, host := range h.apps {
		names = append(names, host.Name)
	}
	t.poolers = supervise(ctx, names, h.poolers)
	for app, host := range h.apps {
		for i, role := range []string{"api", "relay", "consumer", "sweeper"} {
			address := fmt.Sprintf("%s:%d", host.Address, 8080+i)
			p := shop.New(role+" on "+host.Name, h.env(app), "-backend=services", "-role="+role, "-addr="+address,
				"-user-limit=1000000000", "-global-limit=1000000000", "-hold="+hold.String())
			p.On = host.Start
			if err := p.Start(binary); err != nil {
				return t, err
			}
			t.processes = append(t.processes, p)
			if role == "api" {
				t.apis = append(t.apis, "http://"+address)
			}
		}
	}
	if err := harness.Poll(ctx, t.ready); err != nil {
		return t, err
	}
	cfg, err := pgxpool.ParseConfig(h.database())
	if err != nil {
		return t, err
	}
	cfg.ConnConfig.ConnectTimeout = 5 * time.Second
	if t.db, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return t, err
	}
	t.watch, err = harness.NewWatch(ctx, harness.Subject{
		Processes: t.processes, Binary: binary, APIs: func() []string { return t.apis }, DB: t.db,
		Broker: harness.RabbitMQ{
			Dial: h.dial, Admin: h.rabbit[0].AdminURL,
			Queue: amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum, amqp.SingleActiveConsumerArg: true},
		},
		Hold: hold, Seed: rand.Uint64(), Patience: giveUp,
	})
	return t, err
}

func (t *trial) ready(context.Context) error { return shop.AllReady(t.processes) }

// close ends the processes. It returns an error if one does not end properly.
func (t *trial) close() error {
	if t.watch != nil {
		t.watch.Close()
	}
	if t.db != nil {
		t.db.Close()
	}
	err := t.processes.Stop()
	t.poolers.stop()
	return err
}

// tell prints the end of each log.
func (t *trial) tell(to io.Writer) {
	for _, p := range t.processes {
		log := p.Log()
		fmt.Fprintf(to, "end of the log of %s:\n%s\n", p.Name, log[max(0, len(log)-8000):])
	}
}

// verdict is the result of the whole trial.
type verdict struct {
	outcomes []harness.Outcome
	requests int64
	held     int64
	broker   harness.Verdict
	crashes  []crash // of PgBouncer
	faults   []string
}

// run makes each chosen fault happen once, until one breaks a promise.
func (t *trial) run(ctx context.Context, chosen *regexp.Regexp) (v verdict, err error) {
	for _, f := range t.faults() {
		if !chosen.MatchString(f.Kind + ": " + f.Target) {
			continue
		}
		t.poolers.now(f.Target)
		o, j, err := t.watch.Suffer(ctx, f)
		fmt.Fprintln(os.Stderr, o)
		if err != nil {
			return v, fmt.Errorf("%s: %s: %w", f.Kind, f.Target, err)
		}
		v.outcomes, v.broker = append(v.outcomes, o), j.Broker
		for _, f := range o.Findings {
			v.faults = append(v.faults, fmt.Sprintf("%s: %s: %s", o.Target, f.Kind, f.Detail))
		}
		if len(v.faults) > 0 {
			t.tell(os.Stderr)
			break // later findings could belong to this fault
		}
	}
	v.crashes = t.poolers.all()
	v.requests, v.held = t.watch.Crowd.Requests(), t.watch.Crowd.Holds()
	return v, nil
}

// outage is how long a fault with an end lasts: longer than any cluster here needs to notice it.
const outage = 20 * time.Second

// faults returns the faults of the clusters and their hosts. The failover of Postgres is last, because no standby is left after it.
func (t *trial) faults() []harness.Fault {
	h := t.house
	whole := func(well func(context.Context) error) func(context.Context) error { // until the cluster is whole again
		return func(ctx context.Context) error { return harness.Poll(ctx, well) }
	}
	killed := func(kind testenv.Kind, target string, find func() *testenv.Server, well func(context.Context) error) harness.Fault {
		var victim *testenv.Server
		return harness.Fault{
			Kind: string(kind), Target: target + " killed", Lasts: outage, After: whole(well),
			Begin: func(context.Context) error {
				if victim = find(); victim == nil {
					return errors.New("there is no such server")
				}
				return victim.Kill()
			},
			End: func(ctx context.Context) error { return victim.Start(ctx) },
		}
	}
	third := h.servers[2]
	return []harness.Fault{
		killed(testenv.Redis, "the primary of the rate limits", func() *testenv.Server { return h.redisPrimary(limitsKey) }, h.redisWell),
		{Kind: "redis", Target: "the slot of the rate limits moved", Begin: func(ctx context.Context) error { return h.moveSlot(ctx, limitsKey) }},
		killed(testenv.RabbitMQ, "the leader of the shop's queue", func() *testenv.Server { return h.leader(shopQueue) }, h.brokersJoined),
		killed(testenv.RabbitMQ, "a follower", func() *testenv.Server { return h.follower(shopQueue) }, h.brokersJoined),
		{
			Kind: "rabbitmq", Target: "a node cut off from the others, clients reach it", Lasts: outage, After: whole(h.allWell),
			Begin: func(ctx context.Context) error { return third.CutFrom(ctx, h.servers[:2]...) },
			End:   func(ctx context.Context) error { return third.HealTo(ctx, h.servers[:2]...) },
		},
		{Kind: "host", Target: "of servers cut off", Lasts: outage, Begin: third.Cut, End: third.Heal, After: whole(h.allWell)},
		{Kind: "host", Target: "of the shop cut off", Lasts: outage, Begin: h.apps[1].Cut, End: h.apps[1].Heal},
		{Kind: "pgbouncer", Target: "of a host killed", Lasts: outage, Begin: func(context.Context) error { return h.poolers[0].Kill() }, End: h.poolers[0].Start},
		killed(testenv.Postgres, "the synchronous standby", func() *testenv.Server { return h.standby }, h.synchronous),
		{Kind: "postgres", Target: "the primary killed, the standby promoted", Begin: h.failOver},
	}
}

const (
	// limitsKey is a key in the slot of all rate limits.
	limitsKey = "{rl}"
	// shopQueue is the consumers' queue.
	shopQueue = "reservation.stats"
)

// eachRedis calls do with every node that answers, and a client of it.
func (h *house) eachRedis(ctx context.Context, do func(s *testenv.Server, c *redis.Client)) {
	for _, s := range h.redis {
		opts, err := redis.ParseURL(s.URL())
		if err != nil {
			continue
		}
		opts.MaxRetries, opts.DialTimeout = -1, 2*time.Second
		c := redis.NewClient(opts)
		do(s, c)
		_ = c.Close()
	}
}

// redisPrimary returns the node that serves a key; nil if there is none.
func (h *house) redisPrimary(key string) (found *testenv.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	h.eachRedis(ctx, func(s *testenv.Server, c *redis.Client) {
		if err := c.Exists(ctx, key).Err(); err == nil {
			found = s
		}
	})
	return found
}

// moveSlot moves the slot of a key to another primary and back, like redis-cli --cluster reshard.
func (h *house) moveSlot(ctx context.Context, key string) error {
	var addresses []string
	for _, s := range h.redis {
		addresses = append(addresses, addressOf(s.URL()))
	}
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addresses})
	defer cluster.Close()
	slot, err := cluster.ClusterKeySlot(ctx, key).Result()
	if err != nil {
		return err
	}
	from := h.redisPrimary(key)
	var to *testenv.Server
	h.eachRedis(ctx, func(s *testenv.Server, c *redis.Client) {
		role, err := c.Do(ctx, "ROLE").Slice()
		if err == nil && len(role) > 0 && role[0] == "master" && s != from {
			to = s
		}
	})
	if from == nil || to == nil {
		return errors.New("there are no two primaries")
	}
	if err := moveSlot(ctx, slot, from, to); err != nil {
		return err
	}
	_ = runloop.Sleep(ctx, 5*time.Second)
	return moveSlot(ctx, slot, to, from)
}

// stepPause separates the steps of a move, so that requests come in between.
const stepPause = 500 * time.Millisecond

func moveSlot(ctx context.Context, slot int64, from, to *testenv.Server) error {
	a, b, err := twoClients(from, to)
	if err != nil {
		return err
	}
	defer a.Close()
	defer b.Close()
	fromID, err1 := a.Do(ctx, "CLUSTER", "MYID").Text()
	toID, err2 := b.Do(ctx, "CLUSTER", "MYID").Text()
	err = errors.Join(err1, err2,
		b.Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", fromID).Err(),
		a.Do(ctx, "CLUSTER", "SETSLOT", slot, "MIGRATING", toID).Err())
	if err != nil {
		return err
	}
	_ = runloop.Sleep(ctx, stepPause)
	host, port, _ := strings.Cut(b.Options().Addr, ":")
	for {
		keys, err := a.ClusterGetKeysInSlot(ctx, int(slot), 100).Result()
		if err != nil {
			return err
		}
		if len(keys) == 0 {
			break
		}
		for _, k := range keys {
			if err := a.Migrate(ctx, host, port, k, 0, 5*time.Second).Err(); err != nil {
				return err
			}
		}
	}
	_ = runloop.Sleep(ctx, stepPause)
	return errors.Join(
		b.Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", toID).Err(),
		a.Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", toID).Err())
}

func twoClients(from, to *testenv.Server) (a, b *redis.Client, err error) {
	first, err1 := redis.ParseURL(from.URL())
	second, err2 := redis.ParseURL(to.URL())
	if err := errors.Join(err1, err2); err != nil {
		return nil, nil, err
	}
	return redis.NewClient(first), redis.NewClient(second), nil
}

// redisWell fails unless every node sees a whole cluster with its replicas.
func (h *house) redisWell(ctx context.Context) error {
	bad := errors.New("no node of Redis answers")
	replicas, answered := 0, 0
	h.eachRedis(ctx, func(_ *testenv.Server, c *redis.Client) {
		info, err := c.ClusterInfo(ctx).Result()
		if err == nil && strings.Contains(info, "cluster_state:ok") {
			answered++
		}
		if link, err := c.Info(ctx, "replication").Result(); err == nil && strings.Contains(link, "master_link_status:up") {
			replicas++
		}
	})
	if answered < len(h.redis) || replicas < len(h.redis)/2 {
		return fmt.Errorf("%w: %d of %d, %d replicas", bad, answered, len(h.redis), replicas)
	}
	return nil
}

// leader returns the node that leads a quorum queue; nil if it is unknown.
func (h *house) leader(queue string) *testenv.Server { return h.member(queue, true) }

// follower returns a node of the queue that is not its leader.
func (h *house) follower(queue string) *testenv.Server { return h.member(queue, false) }

func (h *house) member(queue string, leads bool) *testenv.Server {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, s := range h.rabbit {
		var q struct{ Leader string }
		if askBroker(ctx, s, "/api/queues/%2F/"+queue, &q) != nil || q.Leader == "" {
			continue
		}
		for i, host := range h.servers {
			if (q.Leader == "holdfast@"+host.Address) == leads {
				return h.rabbit[i]
			}
		}
	}
	return nil
}

// allWell fails unless every cluster is whole.
func (h *house) allWell(ctx context.Context) error {
	errs := make([]error, 3)
	var asking sync.WaitGroup
	for i, well := range []func(context.Context) error{h.brokersJoined, h.redisWell, h.synchronous} {
		asking.Go(func() { errs[i] = well(ctx) })
	}
	asking.Wait()
	return errors.Join(errs...)
}

// failOver does the work of an operator when the primary is lost: it promotes the standby, which then waits for no other,
// and moves the address to it.
func (h *house) failOver(ctx context.Context) error {
	if err := h.primary.Kill(); err != nil {
		return err
	}
	if err := h.servers[0].Drop(ctx, h.address); err != nil {
		return err
	}
	if err := h.standby.Promote(ctx); err != nil {
		return err
	}
	if err := onPostgres(ctx, h.standby.URL(), "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()"); err != nil {
		return err
	}
	return h.servers[1].Take(ctx, h.address)
}

// supervisor restarts a PgBouncer that has ended by itself, like the supervisor of a host, and counts it. Version 1.18
// ends with "server in bad state" when clients cancel statements: PgBouncer issue 822.
type supervisor struct {
	stop func()

	mu      sync.Mutex
	during  string
	crashes []crash
}

// crash is an unexpected end of a server.
type crash struct{ host, during, said string }

// supervise watches servers on hosts of these names, until stop.
func supervise(ctx context.Context, names []string, servers []*testenv.Server) *supervisor {
	ctx, cancel := context.WithCancel(ctx)
	s := &supervisor{during: "the start"}
	var all sync.WaitGroup
	for i, server := range servers {
		all.Go(func() {
			for runloop.Sleep(ctx, 200*time.Millisecond) == nil {
				if server.Crashed() {
					s.note(names[i], server.Log())
					if err := server.Start(ctx); err != nil && ctx.Err() == nil {
						fmt.Fprintf(os.Stderr, "clusters: %s on %s does not start again: %v\n", server.Kind(), names[i], err)
					}
				}
			}
		})
	}
	s.stop = func() {
		cancel()
		all.Wait()
	}
	return s
}

// note records a crash, with the last line of the log.
func (s *supervisor) note(host, log string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	said := log[strings.LastIndexByte(log, '\n')+1:]
	fmt.Fprintf(os.Stderr, "clusters: PgBouncer on %s has ended by itself: %s\n", host, said)
	s.crashes = append(s.crashes, crash{host, s.during, said})
}

// now sets the current fault.
func (s *supervisor) now(fault string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.during = fault
}

// all returns the crashes so far.
func (s *supervisor) all() []crash {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]crash(nil), s.crashes...)
}
