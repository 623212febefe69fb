package inboxnats_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The server is killed while messages are published and consumed.
func TestKilledServer_losesNothing(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.NATS)
	conn := natstest.Connect(t, server.URL())
	load{faults: 2}.run(t, conn, "shop", func() { noError(t, server.Kill(), server.Start(t.Context())) })
	stream, err := natstest.JetStream(t, conn).Stream(t.Context(), "shop")
	noError(t, err)
	if state := stream.CachedInfo().State; state.LastSeq != 1+loaded { // with one of Setup
		t.Errorf("%d messages were stored, want %d", state.LastSeq, 1+loaded)
	}
}

// In a cluster of three, the server that leads the stream is killed, and starts again while others work.
func TestKilledLeader_losesNothing(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "waits for elections in a cluster")
	servers := newCluster(t)
	var urls []string
	for _, s := range servers {
		urls = append(urls, s.URL())
	}
	conn := natstest.Connect(t, strings.Join(urls, ","))
	for name, ordered := range map[string]bool{"shared": false, "ordered": true} {
		t.Run(name, func(t *testing.T) {
			var away *testenv.Server
			load{faults: 4, ordered: ordered, replicas: len(servers)}.run(t, conn, name, func() {
				if away != nil {
					noError(t, away.Start(t.Context()))
					away = nil
					return
				}
				testenv.Eventually(t, func() error {
					stream, err := natstest.JetStream(t, conn).Stream(t.Context(), name)
					if err != nil {
						return err
					}
					away = servers[stream.CachedInfo().Cluster.Leader]
					return away.Kill()
				})
			})
		})
	}
}

// newCluster starts three servers, and returns them by their names.
func newCluster(t *testing.T) map[string]*testenv.Server {
	t.Helper()
	const size = 3
	var addresses, routes [size]string
	for i := range addresses {
		port, err := testenv.FreePort()
		noError(t, err)
		addresses[i] = fmt.Sprintf("127.0.0.1:%d", port)
		routes[i] = strconv.Quote("nats://" + addresses[i])
	}
	servers := map[string]*testenv.Server{}
	for i, address := range addresses {
		name := fmt.Sprintf("n%d", i)
		servers[name] = testenv.Private(t, testenv.NATS, "server_name: "+name,
			fmt.Sprintf("cluster { name: test, listen: %q, routes: [%s] }", address, strings.Join(routes[:], ",")))
	}
	return servers
}

// load is messages that are published one after the other, and consumed meanwhile by a processor that remembers ids.
type load struct {
	faults   int // while it is published
	ordered  bool
	replicas int
}

// loaded is the number of messages of a load.
const loaded = 300

// run publishes and consumes the messages. Each is handled once, none is a dead letter, and an ordered consumer handles
// them in their order.
func (l load) run(t *testing.T, conn *nats.Conn, stream string, fault func()) {
	t.Helper()
	var mu sync.Mutex
	var handled []uuid.UUID
	store, err := inboxtest.New(txretrytest.New(txretrytest.Config{}), billing, inboxpgx.Config{})
	noError(t, err)
	noError(t, inboxpgx.Handle(store, "event", func(ctx context.Context, _ pgx.Tx, _ struct{}) error {
		m, _ := inbox.FromContext(ctx)
		mu.Lock()
		defer mu.Unlock()
		handled = append(handled, m.ID)
		return nil
	}))
	cfg := inbox.ConsumerConfig{Name: billing, Ordered: l.ordered, Logger: slog.New(slog.DiscardHandler)}
	consumer, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: stream, Replicas: l.replicas}, store, cfg)
	noError(t, err)
	testenv.Eventually(t, func() error { return consumer.Setup(t.Context()) }) // a new cluster elects its leader first
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	publisher, err := outboxnats.NewPublisher(conn, outboxnats.Config{Topic: stream})
	noError(t, err)
	var sent []uuid.UUID
	for i := range loaded {
		if i > 0 && i%(loaded/(l.faults+1)) == 0 {
			fault()
		}
		m := outbox.Message{ID: ids.Deterministic(time.Now(), fmt.Sprint(i)), Name: "event", Key: "key", Body: []byte("{}")}
		sent = append(sent, m.ID)
		testenv.Eventually(t, func() error { // as a relay does
			outcome := make(chan error, 1)
			publisher.Publish(t.Context(), m, func(err error) { outcome <- err })
			return <-outcome
		})
	}
	testenv.Eventually(t, func() error {
		stats, err := consumer.Stats(t.Context())
		mu.Lock()
		defer mu.Unlock()
		if err == nil && (len(handled) < loaded || stats.Waiting > 0) {
			err = fmt.Errorf("%d of %d messages were handled: %+v", len(handled), loaded, stats)
		}
		return err
	})
	stop()
	noError(t, <-ended)
	dead, err := consumer.DeadLetters().Count(t.Context(), inbox.Filter{})
	noError(t, err)
	if dead > 0 {
		t.Errorf("%d dead letters", dead)
	}
	if !l.ordered {
		byID := func(a, b uuid.UUID) int { return strings.Compare(a.String(), b.String()) }
		slices.SortFunc(sent, byID)
		slices.SortFunc(handled, byID)
	}
	if !slices.Equal(handled, sent) {
		t.Errorf("%d messages were sent, and %d handled, or in another order", len(sent), len(handled))
	}
}

// Check names missing objects, and a durable consumer that others have changed.
func TestCheck(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	consumer, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: name}, inbox.NewMux(), inbox.ConsumerConfig{Name: billing})
	noError(t, err)
	if err := consumer.Check(t.Context()); err == nil || strings.Count(err.Error(), "call Consumer.Setup") != 5 {
		t.Errorf("before Setup: %v", err)
	}
	for range 2 {
		noError(t, consumer.Setup(t.Context()))
	}
	noError(t, consumer.Check(t.Context()))
	js := natstest.JetStream(t, conn)
	c, err := js.Consumer(t.Context(), name, billing)
	noError(t, err)
	cfg := c.CachedInfo().Config
	cfg.AckWait = 3 * time.Second
	_, err = js.UpdateConsumer(t.Context(), name, cfg)
	noError(t, err)
	if err := consumer.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "has ack_wait 3s, under 4s") {
		t.Errorf("with a short ack wait: %v", err)
	}
	cfg.BackOff, cfg.MaxDeliver, cfg.MaxAckPending = []time.Duration{time.Second, 2 * time.Second}, 3, 1
	_, err = js.UpdateConsumer(t.Context(), name, cfg)
	noError(t, err)
	err = consumer.Check(t.Context())
	for _, want := range []string{"whose first step 1s replaces ack_wait", "drops messages after 3", "stops at 1 unsettled"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}

// A stream of others that takes no message of a partition is named by Setup and Check.
func TestSetup_rejectsStreamWithoutSubject(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	js := natstest.JetStream(t, conn)
	stream := jetstream.StreamConfig{Name: name, Subjects: []string{name + ".0.order.*", name + ".1.>"}, Retention: jetstream.InterestPolicy}
	whole := stream
	whole.Subjects = []string{name + ".>"}
	consumer, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: name, Partitions: 3}, inbox.NewMux(), inbox.ConsumerConfig{Name: billing, Ordered: true})
	noError(t, err)
	_, err = js.CreateStream(t.Context(), whole)
	noError(t, err)
	noError(t, consumer.Setup(t.Context()))
	_, err = js.UpdateStream(t.Context(), stream)
	noError(t, err)
	want := fmt.Sprintf("stream %q takes no message of subject %q; add subject %[2]q to stream %[1]q", name, name+".2.>")
	for call, err := range map[string]error{"Setup": consumer.Setup(t.Context()), "Check": consumer.Check(t.Context())} {
		if err == nil || !strings.Contains(err.Error(), want) || strings.Count(err.Error(), "takes no message") != 1 {
			t.Errorf("%s: %v, want %q", call, err, want)
		}
	}
}
