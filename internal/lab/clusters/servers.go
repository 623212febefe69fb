package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/hosts"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

// house is all servers of the shop, spread over hosts.
type house struct {
	net     *hosts.Network
	servers []*hosts.Host // three
	apps    []*hosts.Host // for the roles of the shop, each with a PgBouncer

	primary, standby *testenv.Server // of Postgres, on the first two hosts
	address          string          // of the primary, which moves to the standby
	poolers          []*testenv.Server
	redis            []*testenv.Server // two on each host: three primaries, then their replicas
	rabbit           []*testenv.Server // one on each host
}

// openHouse starts everything. The caller must close the house, also after an error.
func openHouse(ctx context.Context, apps int) (_ *house, err error) {
	h := &house{}
	if h.net, err = hosts.Open(ctx); err != nil {
		return h, err
	}
	for i := range 3 + apps {
		name := fmt.Sprint("server", i+1)
		if i >= 3 {
			name = fmt.Sprint("app", i-2)
		}
		host, err := h.net.Add(ctx, name)
		if err != nil {
			return h, err
		}
		if i < 3 {
			h.servers = append(h.servers, host)
		} else {
			h.apps = append(h.apps, host)
		}
	}
	errs := make([]error, 3)
	var starting sync.WaitGroup
	for i, start := range []func(context.Context) error{h.startPostgres, h.startRedis, h.startRabbitMQ} {
		starting.Go(func() { errs[i] = start(ctx) })
	}
	starting.Wait()
	return h, errors.Join(errs...)
}

func launch(ctx context.Context, host *hosts.Host, kind testenv.Kind, extra ...string) (*testenv.Server, error) {
	return testenv.LaunchSpec(ctx, testenv.Spec{Kind: kind, Extra: extra, Host: host.Host})
}

// startPostgres starts a primary, a standby that it waits for at each commit, and a PgBouncer on each host with roles.
// The PgBouncers reach the primary by an address that can move.
func (h *house) startPostgres(ctx context.Context) (err error) {
	anywhere := []string{"-c", "listen_addresses=*", "-c", "track_commit_timestamp=on"}
	if h.primary, err = launch(ctx, h.servers[0], testenv.Postgres, anywhere...); err != nil {
		return err
	}
	h.address = h.net.Shared(0)
	if err := h.servers[0].Take(ctx, h.address); err != nil {
		return err
	}
	h.standby, err = testenv.LaunchSpec(ctx, testenv.Spec{
		Kind: testenv.Postgres, Extra: anywhere, Host: h.servers[1].Host, Follows: h.primary.URL() + "&application_name=standby",
	})
	if err != nil {
		return err
	}
	if err := onPostgres(ctx, h.primary.URL(), "ALTER SYSTEM SET synchronous_standby_names = 'standby'", "SELECT pg_reload_conf()"); err != nil {
		return err
	}
	if err := harness.Poll(ctx, h.synchronous); err != nil {
		return err
	}
	for _, host := range h.apps {
		p, err := launch(ctx, host, testenv.PgBouncer, h.database(),
			"ignore_startup_parameters = enable_seqscan,extra_float_digits", "default_pool_size = 40", "server_login_retry = 1")
		if err != nil {
			return err
		}
		h.poolers = append(h.poolers, p)
	}
	return nil
}

// database returns the address of the current primary.
func (h *house) database() string { return withHost(h.primary.URL(), h.address) }

// withHost replaces the host in a server's URL.
func withHost(rawURL, address string) string {
	begin, port, _ := strings.Cut(rawURL[strings.LastIndex(rawURL, "@")+1:], ":")
	return strings.Replace(rawURL, begin+":"+port, address+":"+port, 1)
}

// synchronous fails unless the primary waits for its standby.
func (h *house) synchronous(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, h.primary.URL())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var n int
	if err := conn.QueryRow(ctx, "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'").Scan(&n); err != nil {
		return err
	}
	if n != 1 {
		return errors.New("no synchronous standby")
	}
	return nil
}

func onPostgres(ctx context.Context, url string, statements ...string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for _, sql := range statements {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	return nil
}

// startRedis starts a Redis Cluster of three primaries, each with a replica on another host.
func (h *house) startRedis(ctx context.Context) error {
	for i := range 6 {
		s, err := launch(ctx, h.servers[(i+i/3)%3], testenv.Redis, "--cluster-enabled", "yes", "--cluster-node-timeout", "5000", "--appendonly", "yes")
		if err != nil {
			return err
		}
		h.redis = append(h.redis, s)
	}
	return formCluster(ctx, h.redis)
}

const slots = 16384

// formCluster makes the first half of the nodes primaries, and each other node a replica of one.
func formCluster(ctx context.Context, servers []*testenv.Server) error {
	var nodes []*redis.Client
	var addresses []string
	for _, s := range servers {
		opts, err := redis.ParseURL(s.URL())
		if err != nil {
			return err
		}
		nodes, addresses = append(nodes, redis.NewClient(opts)), append(addresses, opts.Addr)
	}
	defer func() {
		for _, n := range nodes {
			_ = n.Close()
		}
	}()
	primaries := len(nodes) / 2
	for i, n := range nodes {
		if i < primaries {
			if err := n.ClusterAddSlotsRange(ctx, i*slots/primaries, (i+1)*slots/primaries-1).Err(); err != nil {
				return err
			}
		}
		host, port, _ := strings.Cut(addresses[i], ":")
		if err := nodes[0].ClusterMeet(ctx, host, port).Err(); err != nil {
			return err
		}
	}
	for i := range primaries {
		id, err := nodes[i].Do(ctx, "CLUSTER", "MYID").Text()
		if err != nil {
			return err
		}
		// The replica must know its primary first.
		err = harness.Poll(ctx, func(ctx context.Context) error { return nodes[primaries+i].ClusterReplicate(ctx, id).Err() })
		if err != nil {
			return err
		}
	}
	return harness.Poll(ctx, func(ctx context.Context) error {
		for _, n := range nodes {
			info, err := n.ClusterInfo(ctx).Result()
			if err == nil && (!strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d", len(nodes)))) {
				err = fmt.Errorf("the cluster is not ready: %s", info)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// startRabbitMQ starts a cluster of three. A node that cannot reach another one stops serving.
func (h *house) startRabbitMQ(ctx context.Context) error {
	settings := []string{
		"cluster_formation.peer_discovery_backend = classic_config",
		"cluster_partition_handling = pause_minority",
		"net_ticktime = 8",
	}
	for i, host := range h.servers {
		settings = append(settings, fmt.Sprintf("cluster_formation.classic_config.nodes.%d = holdfast@%s", i+1, host.Address))
	}
	h.rabbit = make([]*testenv.Server, len(h.servers))
	errs := make([]error, len(h.servers))
	start := func(i int) { h.rabbit[i], errs[i] = launch(ctx, h.servers[i], testenv.RabbitMQ, settings...) }
	start(0) // the others join an existing cluster, so that nodes need not wait for each other
	var starting sync.WaitGroup
	for i := range h.servers[1:] {
		starting.Go(func() { start(i + 1) })
	}
	starting.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return harness.Poll(ctx, h.brokersJoined)
}

// brokersJoined fails unless all three nodes of RabbitMQ form one cluster.
func (h *house) brokersJoined(ctx context.Context) error {
	for _, s := range h.rabbit {
		var nodes []struct{ Running bool }
		if err := askBroker(ctx, s, "/api/nodes", &nodes); err != nil {
			return err
		}
		running := 0
		for _, n := range nodes {
			if n.Running {
				running++
			}
		}
		if running != len(h.rabbit) {
			return fmt.Errorf("%d nodes of RabbitMQ are joined", running)
		}
	}
	return nil
}

// askBroker calls the management API with a short timeout, because a node may be paused.
func askBroker(ctx context.Context, s *testenv.Server, path string, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return testenv.Admin(ctx, s.AdminURL(), http.MethodGet, path, nil, answer)
}

// env has the addresses of the servers for the roles on an app host: their own PgBouncer, and all nodes of the clusters.
func (h *house) env(app int) []string {
	var brokers, more []string
	for _, s := range h.rabbit {
		brokers = append(brokers, s.URL())
	}
	for _, s := range h.redis[1:] {
		more = append(more, "addr="+addressOf(s.URL()))
	}
	return shop.Servers{
		Database: h.poolers[app].URL() + "&default_query_exec_mode=exec",
		Redis:    "redis://" + addressOf(h.redis[0].URL()) + "?" + strings.Join(more, "&"),
		Broker:   strings.Join(brokers, ","),
	}.Env()
}

// addressOf returns the host and port in a server's URL.
func addressOf(rawURL string) string {
	_, after, _ := strings.Cut(rawURL, "://")
	if _, host, ok := strings.Cut(after, "@"); ok {
		after = host
	}
	address, _, _ := strings.Cut(after, "/")
	return address
}

// dial connects to any node of RabbitMQ.
func (h *house) dial(ctx context.Context) (conn *amqp.Connection, err error) {
	first := rand.IntN(len(h.rabbit))
	for i := range h.rabbit {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		conn, err = outboxamqp.Dial(h.rabbit[(first+i)%len(h.rabbit)].URL(), amqp.Config{Heartbeat: 3 * time.Second})(attempt)
		cancel()
		if err == nil {
			return conn, nil
		}
	}
	return nil, err
}

// close ends everything in reverse order.
func (h *house) close() error {
	var errs []error
	for _, group := range [][]*testenv.Server{h.poolers, {h.standby, h.primary}, h.redis, h.rabbit} {
		for _, s := range group {
			if s != nil {
				errs = append(errs, s.Close())
			}
		}
	}
	return errors.Join(errs...)
}
