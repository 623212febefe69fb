// Package redistest gives each test its own logical database on the shared Redis.
package redistest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	counterKey  = "holdfast:test:counter"
	claimKey    = "holdfast:test:claim:%d"
	claimTTL    = time.Hour // longer than any test run; frees the claims of a killed one
	maxDatabase = 16        // Redis's default, used if CONFIG GET fails
)

// New returns a client of an empty database that no other test uses. When the test ends, the database is emptied and the
// client closed.
func New(t testing.TB) *redis.Client {
	t.Helper()
	return Client(t, URL(t))
}

// URL returns the address of an empty database that no other test uses.
func URL(t testing.TB) string {
	t.Helper()
	base := testenv.RedisURL(t)
	admin := patient(t, base)
	db, err := claim(t.Context(), admin)
	if err != nil {
		t.Fatalf("redistest: claim a database: %v", err)
	}
	u, err := url.Parse(base)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + strconv.Itoa(db)
	own := patient(t, u.String())
	flush(t, own)
	t.Cleanup(func() {
		flush(t, own)
		if err := admin.Del(context.WithoutCancel(t.Context()), fmt.Sprintf(claimKey, db)).Err(); err != nil {
			t.Errorf("redistest: return database %d: %v", db, err)
		}
	})
	return u.String()
}

// Client returns a client for any address. It is closed when the test ends.
func Client(t testing.TB, rawURL string) *redis.Client {
	t.Helper()
	return newClient(t, rawURL, 0)
}

// patient returns a client for set-up and clean-up: a busy machine may need longer than the client's usual 3 s.
func patient(t testing.TB, rawURL string) *redis.Client {
	t.Helper()
	return newClient(t, rawURL, time.Minute)
}

func newClient(t testing.TB, rawURL string, readTimeout time.Duration) *redis.Client {
	t.Helper()
	opts, err := redis.ParseURL(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	opts.ReadTimeout = cmp.Or(readTimeout, opts.ReadTimeout)
	client := redis.NewClient(opts)
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Errorf("redistest: %v", err)
		}
	})
	return client
}

// claim tries the databases 1, 2, … until it finds a free one.
func claim(ctx context.Context, admin *redis.Client) (int, error) {
	databases := int64(maxDatabase)
	if config, err := admin.ConfigGet(ctx, "databases").Result(); err == nil {
		if n, err := strconv.ParseInt(config["databases"], 10, 64); err == nil {
			databases = n
		}
	}
	if databases < 2 {
		return 0, fmt.Errorf("the server has %d databases, tests need 2", databases)
	}
	for {
		n, err := admin.Incr(ctx, counterKey).Result()
		if err != nil {
			return 0, err
		}
		db := 1 + n%(databases-1)
		free, err := admin.SetNX(ctx, fmt.Sprintf(claimKey, db), "claimed", claimTTL).Result()
		if err != nil {
			return 0, err
		}
		if free {
			return int(db), nil
		}
		if n%(databases-1) == 0 { // all are taken: wait until one is free
			select {
			case <-ctx.Done():
				return 0, ctx.Err()
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
}

func flush(t testing.TB, client *redis.Client) {
	t.Helper()
	if err := client.FlushDB(context.WithoutCancel(t.Context())).Err(); err != nil {
		t.Fatalf("redistest: %v", err)
	}
}

// Configless returns a client whose CONFIG commands fail with err.
func Configless(client redis.UniversalClient, err error) redis.UniversalClient {
	return configless{client, err}
}

type configless struct {
	redis.UniversalClient
	err error
}

func (c configless) ConfigGet(ctx context.Context, _ string) *redis.MapStringStringCmd {
	cmd := redis.NewMapStringStringCmd(ctx)
	cmd.SetErr(c.err)
	return cmd
}

// Refusal is an error reply of Redis.
type Refusal string

func (r Refusal) Error() string { return string(r) }

// RedisError implements redis.Error.
func (Refusal) RedisError() {}

// ClusterFlags are the flags for a node of Join. The long timeout keeps a busy machine from causing failovers.
var ClusterFlags = []string{"--cluster-enabled", "yes", "--cluster-node-timeout", "10000"}

// Cluster returns a client of a Redis Cluster of three private nodes without replicas, and the nodes. Everything is removed
// when the test ends.
func Cluster(t testing.TB) (*redis.ClusterClient, []*testenv.Server) {
	t.Helper()
	var servers []*testenv.Server
	for range 3 {
		servers = append(servers, testenv.Private(t, testenv.Redis, ClusterFlags...))
	}
	client, err := Join(t.Context(), servers)
	if err != nil {
		t.Fatalf("redistest: cluster: %v", err)
	}
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Errorf("redistest: %v", err)
		}
	})
	return client, servers
}

// Join joins servers that were started with ClusterFlags to a Redis Cluster without replicas. It returns a client of the
// cluster, which the caller must close.
func Join(ctx context.Context, servers []*testenv.Server) (_ *redis.ClusterClient, err error) {
	const slots = 16384
	var clients []*redis.Client
	defer func() {
		for _, c := range clients {
			err = errors.Join(err, c.Close())
		}
	}()
	var addrs []string
	for n, s := range servers {
		opts, err := redis.ParseURL(s.URL())
		if err != nil {
			return nil, err
		}
		c := redis.NewClient(opts)
		clients, addrs = append(clients, c), append(addrs, opts.Addr)
		if err := c.ClusterAddSlotsRange(ctx, n*slots/len(servers), (n+1)*slots/len(servers)-1).Err(); err != nil {
			return nil, err
		}
	}
	for _, addr := range addrs[1:] {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		if err := clients[0].ClusterMeet(ctx, host, port).Err(); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, testenv.Patience)
	defer cancel()
	for _, c := range clients {
		if err := awaitNodes(ctx, c, len(servers)); err != nil {
			return nil, err
		}
	}
	return redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs}), nil
}

// awaitNodes waits until the node knows the given number of nodes and serves all slots.
func awaitNodes(ctx context.Context, c *redis.Client, nodes int) error {
	for {
		info, err := c.ClusterInfo(ctx).Result()
		if err == nil && strings.Contains(info, "cluster_state:ok") && strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d", nodes)) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("cluster not ready: %w: %s", cmp.Or(err, ctx.Err()), info)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// NodesInUse returns how many nodes of a cluster contain keys.
func NodesInUse(ctx context.Context, client *redis.ClusterClient) (int64, error) {
	var used atomic.Int64
	err := client.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
		n, err := node.DBSize(ctx).Result()
		if n > 0 {
			used.Add(1)
		}
		return err
	})
	return used.Load(), err
}

// Failover returns a client of a Redis Cluster of one private node and its replica. failOver kills the node, makes the
// replica take over, and returns a client of the replica. The cluster's client reloads the map of slots only when it must,
// not periodically. Everything is removed when the test ends.
func Failover(t testing.TB) (client *redis.ClusterClient, failOver func() *redis.Client) {
	t.Helper()
	var servers [2]*testenv.Server
	var nodes [2]*redis.Client
	for i := range servers {
		servers[i] = testenv.Private(t, testenv.Redis, "--cluster-enabled", "yes", "--repl-diskless-sync-delay", "0")
		nodes[i] = Client(t, servers[i].URL())
	}
	primary, replica := nodes[0], nodes[1]
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("redistest: failover: %v", err)
		}
	}
	must(primary.ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	host, port, err := net.SplitHostPort(replica.Options().Addr)
	must(err)
	must(primary.ClusterMeet(t.Context(), host, port).Err())
	id, err := primary.Do(t.Context(), "CLUSTER", "MYID").Text()
	must(err)
	testenv.Eventually(t, func() error { return replica.ClusterReplicate(t.Context(), id).Err() })
	testenv.Eventually(t, func() error {
		info, err := replica.Info(t.Context(), "replication").Result()
		if err == nil && !strings.Contains(info, "master_link_status:up") {
			err = fmt.Errorf("the replica has no data yet: %s", info)
		}
		return err
	})
	testenv.Eventually(t, func() error { // the client gets the replica's address from the node
		known, err := primary.ClusterSlots(t.Context()).Result()
		if err == nil && (len(known) != 1 || len(known[0].Nodes) != len(nodes)) {
			err = fmt.Errorf("the node does not know its replica yet: %v", known)
		}
		return err
	})
	client = redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{primary.Options().Addr}, ClusterStateReloadInterval: 24 * time.Hour, DialerRetries: 1,
	})
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Errorf("redistest: %v", err)
		}
	})
	testenv.Eventually(t, func() error { return client.Exists(t.Context(), "key").Err() })
	return client, func() *redis.Client {
		t.Helper()
		must(servers[0].Kill())
		must(replica.Do(t.Context(), "CLUSTER", "FAILOVER", "TAKEOVER").Err())
		return replica
	}
}

// Move moves the slot of a key from one node of a Cluster to another, like redis-cli --cluster reshard: first Begin, then
// Keys, then End.
type Move struct {
	from, to     *redis.Client
	fromID, toID string
	slot         int64
}

// NewMove prepares a Move.
func NewMove(t testing.TB, client *redis.ClusterClient, servers []*testenv.Server, key string) *Move {
	t.Helper()
	slot, err1 := client.ClusterKeySlot(t.Context(), key).Result()
	from, err2 := client.MasterForKey(t.Context(), key)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatalf("redistest: move: %v", err)
	}
	m := &Move{from: from, slot: slot}
	for _, s := range servers {
		if c := Client(t, s.URL()); c.Options().Addr != from.Options().Addr {
			m.to = c
		}
	}
	m.fromID, err1 = m.from.Do(t.Context(), "CLUSTER", "MYID").Text()
	m.toID, err2 = m.to.Do(t.Context(), "CLUSTER", "MYID").Text()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatalf("redistest: move: %v", err)
	}
	return m
}

// Begin makes both nodes answer for the slot: the old node for the keys that it still has.
func (m *Move) Begin(ctx context.Context) error {
	return errors.Join(
		m.to.Do(ctx, "CLUSTER", "SETSLOT", m.slot, "IMPORTING", m.fromID).Err(),
		m.from.Do(ctx, "CLUSTER", "SETSLOT", m.slot, "MIGRATING", m.toID).Err())
}

// Keys moves the keys of the slot.
func (m *Move) Keys(ctx context.Context) error {
	host, port, err := net.SplitHostPort(m.to.Options().Addr)
	for err == nil {
		keys, failed := m.from.ClusterGetKeysInSlot(ctx, int(m.slot), 100).Result()
		if len(keys) == 0 {
			return failed
		}
		for _, k := range keys {
			err = errors.Join(err, m.from.Migrate(ctx, host, port, k, 0, 5*time.Second).Err())
		}
	}
	return err
}

// End assigns the slot to the new node.
func (m *Move) End(ctx context.Context) error {
	var errs []error
	for _, node := range []*redis.Client{m.to, m.from} {
		errs = append(errs, node.Do(ctx, "CLUSTER", "SETSLOT", m.slot, "NODE", m.toID).Err())
	}
	return errors.Join(errs...)
}
