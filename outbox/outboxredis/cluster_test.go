package outboxredis_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// shards is a Redis Cluster of which one node is to fail.
type shards struct {
	client        *redis.ClusterClient
	healthy, sick string // streams, of two nodes
	sicks         *testenv.Server
	addr          string // of sicks
}

// newShards makes one whose nodes go on without the others.
func newShards(t *testing.T) *shards {
	t.Helper()
	client, servers := redistest.Cluster(t)
	err := client.ForEachMaster(t.Context(), func(ctx context.Context, node *redis.Client) error {
		return node.ConfigSet(ctx, "cluster-require-full-coverage", "no").Err()
	})
	must(t, err)
	s := &shards{client: client, healthy: "healthy"}
	of := func(stream string) string {
		node, err := client.MasterForKey(t.Context(), stream)
		must(t, err)
		return node.Options().Addr
	}
	for n := 0; s.sick == "" || s.addr == of(s.healthy); n++ {
		s.sick = fmt.Sprint("sick", n)
		s.addr = of(s.sick)
	}
	at := slices.IndexFunc(servers, func(server *testenv.Server) bool {
		opts, err := redis.ParseURL(server.URL())
		return err == nil && opts.Addr == s.addr
	})
	s.sicks = servers[at]
	return s
}

// mixed are messages for both streams in turn.
func (s *shards) mixed(n int) (msgs []driver.Message) {
	for range n {
		for _, stream := range []string{s.healthy, s.sick} {
			msgs = append(msgs, driver.Message{ID: uuid.Must(uuid.NewV7()), Name: "a", Exchange: stream})
		}
	}
	return msgs
}

// publishMixed has so many messages of each stream confirmed by the sound node, and not blamed by the other one.
func (s *shards) publishMixed(t *testing.T, p *outboxredis.Publisher, each int) {
	t.Helper()
	msgs := s.mixed(each)
	for i, err := range publishAll(t, p, msgs) {
		switch msgs[i].Exchange {
		case s.healthy:
			if err != nil {
				t.Errorf("message %d for a sound node: %v", i, err)
			}
		case s.sick:
			if driver.ClassOf(err) != driver.Unavailable {
				t.Errorf("message %d for a node that does not answer: %v", i, err)
			}
		}
	}
}

// While one node is silent, the messages for the others are confirmed.
func TestClusterSilentNode(t *testing.T) {
	t.Parallel()
	const each = 50
	s := newShards(t)
	p := newPublisher(t, s.client, outboxredis.Config{})
	must(t, s.sicks.Pause())
	s.publishMixed(t, p, each)
	must(t, s.sicks.Resume())
	if n := s.client.XLen(t.Context(), s.healthy).Val(); n != each {
		t.Errorf("%d messages are stored, want %d", n, each)
	}
}

// A node that is gone behind something that accepts connections and ends them costs no message an
// attempt, though the other nodes answer.
func TestClusterNodeBehindAClosedDoor(t *testing.T) {
	t.Parallel()
	s := newShards(t)
	door := closedDoor(t)
	var gone atomic.Bool
	opts := *s.client.Options()
	opts.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if addr == s.addr && gone.Load() {
			addr = door
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
	client := redis.NewClusterClient(&opts)
	defer client.Close()
	p := newPublisher(t, client, outboxredis.Config{})
	must(t, publish(t, p, driver.Message{Name: "a", Exchange: s.sick}))
	gone.Store(true)
	must(t, s.sicks.Kill())
	for range 5 {
		s.publishMixed(t, p, 10)
	}
}

// closedDoor is the address of what accepts connections and ends them.
func closedDoor(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = listener.Close() // it has nothing to lose
		<-ended
	})
	go func() {
		defer close(ended)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_ = conn.Close() // that is all it is for
		}
	}()
	return listener.Addr().String()
}

// A replica that has taken over takes messages, though nobody refers the client to it.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	client, failOver := redistest.Failover(t)
	p := newPublisher(t, client, outboxredis.Config{})
	send := func() error { return publish(t, p, driver.Message{Name: "a"}) }
	must(t, send())
	failOver()
	testenv.Eventually(t, send)
}
