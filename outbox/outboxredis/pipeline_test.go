package outboxredis_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// publishAll publishes all messages at once, so that they share pipelines, and returns their outcomes.
func publishAll(t *testing.T, p *outboxredis.Publisher, msgs []driver.Message) []error {
	t.Helper()
	outcomes := make([]error, len(msgs))
	var pending sync.WaitGroup
	for i, m := range msgs {
		pending.Add(1)
		p.Publish(t.Context(), m, func(err error) {
			outcomes[i] = err
			pending.Done()
		})
	}
	pending.Wait()
	return outcomes
}

// wantAloneToFail publishes good messages with bad ones among them, the first included.
func wantAloneToFail(t *testing.T, p *outboxredis.Publisher, bad driver.Message, want driver.Class) {
	t.Helper()
	var msgs []driver.Message
	for i := range 200 {
		m := driver.Message{Name: "good", Exchange: "good"}
		if i%50 == 0 {
			m = bad
		}
		m.ID = uuid.Must(uuid.NewV7())
		msgs = append(msgs, m)
	}
	for i, err := range publishAll(t, p, msgs) {
		switch {
		case i%50 == 0 && (err == nil || driver.ClassOf(err) != want):
			t.Errorf("bad message %d: %v, want %s", i, err, want)
		case i%50 != 0 && err != nil:
			t.Errorf("good message %d: %v", i, err)
		}
	}
}

func TestWrongTypeFailsAlone(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	must(t, client.Set(t.Context(), "text", "1", 0).Err())
	bad := driver.Message{Name: "bad", Exchange: "text"}
	wantAloneToFail(t, newPublisher(t, client, outboxredis.Config{}), bad, driver.Unroutable)
}

// A stream that this user may not write is no outage; a forbidden command is one.
func TestForbiddenStreamFailsAlone(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis)
	admin := redistest.Client(t, server.URL())
	as := func(user string, rules ...any) *redis.Client {
		must(t, admin.Do(t.Context(), append([]any{"ACL", "SETUSER", user, "on", ">password"}, rules...)...).Err())
		opts := *admin.Options()
		opts.Username, opts.Password = user, "password"
		client := redis.NewClient(&opts)
		t.Cleanup(func() { _ = client.Close() }) // nothing to lose
		return client
	}
	bad := driver.Message{Name: "bad", Exchange: "other"}
	wantAloneToFail(t, newPublisher(t, as("few", "~good*", "+@all"), outboxredis.Config{}), bad, driver.Unroutable)
	none := newPublisher(t, as("none", "~*", "+@all", "-xadd"), outboxredis.Config{})
	if err := publish(t, none, driver.Message{Name: "good"}); driver.ClassOf(err) != driver.Unavailable {
		t.Errorf("no right to write at all: %v", err)
	}
}

// Redis closes the connection because of a command that is too large, and the other commands in flight get no answer.
func TestTooLargeForRedisFailsAlone(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis, "--proto-max-bulk-len", "1mb")
	bad := driver.Message{Name: "bad", Body: bytes.Repeat([]byte("x"), 2<<20)}
	wantAloneToFail(t, newPublisher(t, redistest.Client(t, server.URL()), outboxredis.Config{}), bad, driver.Retryable)
}

// onSilent runs a test in a bubble with a publisher whose Timeout is a second. Its client waits forever and ignores
// contexts. The clock stands still while the server works.
func onSilent(t *testing.T, test func(t *testing.T, server *silent.Redis, p *outboxredis.Publisher)) {
	t.Helper()
	url := redistest.URL(t)
	synctest.Test(t, func(t *testing.T) {
		server := silent.NewRedis(t, url)
		client := server.Client(t, func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout, o.MaxRetries = -1, -1, -1 })
		test(t, server, newPublisher(t, client, outboxredis.Config{Timeout: time.Second}))
	})
}

// graceful is the timeout plus the second that a client has to notice it.
const graceful = 2 * time.Second

// If a connection falls silent, at any step, the waiting message fails in time and the next one uses another
// connection.
func TestSilentConnection(t *testing.T) {
	t.Parallel()
	redistest.URL(t) // skips before there are subtests
	for name, silence := range map[string]testenv.Silence{
		"handshake":             {On: "hello"},
		"message":               {On: "the body"},
		"message, which counts": {On: "the body", Deliver: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onSilent(t, func(t *testing.T, server *silent.Redis, p *outboxredis.Publisher) {
				server.SilenceOn(silence)
				start := time.Now()
				if err := publish(t, p, driver.Message{Name: "a", Body: []byte("the body")}); driver.ClassOf(err) != driver.Unavailable {
					t.Errorf("a silent connection: %v", err)
				}
				if err := publish(t, p, driver.Message{Name: "a"}); err != nil {
					t.Errorf("the next message: %v", err)
				}
				if took := time.Since(start); took != graceful || server.Silenced() != 1 {
					t.Errorf("both took %v, %d connections silent", took, server.Silenced())
				}
			})
		})
	}
}

// Ready and Check return in time, even if the caller sets no deadline.
func TestSilentServer(t *testing.T) {
	t.Parallel()
	onSilent(t, func(t *testing.T, server *silent.Redis, p *outboxredis.Publisher) {
		if err := p.Ready(t.Context()); err != nil {
			t.Error(err)
		}
		server.Pause()
		for name, call := range map[string]func() error{
			"Ready": func() error { return p.Ready(t.Context()) },
			"Check": func() error { return p.Check(t.Context()) },
		} {
			start := time.Now()
			if err := call(); err == nil {
				t.Errorf("%s is content with a silent server", name)
			}
			if took := time.Since(start); took != graceful {
				t.Errorf("%s took %v", name, took)
			}
		}
	})
}

// shards is a Redis Cluster with one node that fails.
type shards struct {
	client        *redis.ClusterClient
	healthy, sick string // streams on two nodes
	sicks         *testenv.Server
	addr          string // of the sick node
}

// newShards returns a cluster whose nodes work without the others.
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

// mixed returns messages for both streams in turn.
func (s *shards) mixed(n int) (msgs []driver.Message) {
	for range n {
		for _, stream := range []string{s.healthy, s.sick} {
			msgs = append(msgs, driver.Message{ID: uuid.Must(uuid.NewV7()), Name: "a", Exchange: stream})
		}
	}
	return msgs
}

// publishMixed publishes messages to both streams. The healthy node must confirm its messages, and the sick node's
// must fail without being blamed.
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

// A dead node behind a proxy that accepts connections and closes them costs no message an attempt, although the other
// nodes answer.
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

// closedDoor returns the address of a listener that closes every connection.
func closedDoor(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = listener.Close() // errors do not matter here
		<-ended
	})
	go func() {
		defer close(ended)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_ = conn.Close() // its only job
		}
	}()
	return listener.Addr().String()
}

// A promoted replica receives messages, although no node redirects the client to it.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	client, failOver := redistest.Failover(t)
	p := newPublisher(t, client, outboxredis.Config{})
	send := func() error { return publish(t, p, driver.Message{Name: "a"}) }
	must(t, send())
	failOver()
	testenv.Eventually(t, send)
}
