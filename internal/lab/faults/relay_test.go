package faults_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// destination is the queue or the stream of all messages.
const destination = "faults"

// relayPoints are the points where a relay is killed: before it publishes a message, and after the broker has
// confirmed one.
var relayPoints = []string{"publishing", "confirmed"}

// relayJob is a relay between a database and a broker.
type relayJob struct {
	Database, Broker string
	Crash            crash
}

func relayRole(ctx context.Context, text []byte) error {
	var j relayJob
	if err := json.Unmarshal(text, &j); err != nil {
		return err
	}
	return j.run(ctx)
}

func (j relayJob) run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, j.Database)
	if err != nil {
		return err
	}
	defer pool.Close()
	publisher, end, err := j.publisher()
	if err != nil {
		return err
	}
	defer end()
	store, err := outboxpgx.New(pool, outboxpgx.Config{Logger: quiet})
	if err != nil {
		return err
	}
	relay, err := outbox.NewRelay(store, crashPublisher{publisher, &j.Crash}, outbox.RelayConfig{
		Logger: quiet, PollInterval: 50 * time.Millisecond,
		LeaseTTL: time.Second, PublishTimeout: time.Second, // so that the lanes of a killed relay are soon free
	})
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

// publisher returns the publisher for the job's broker, and a function that closes its client.
func (j relayJob) publisher() (readyPublisher, func(), error) {
	if strings.HasPrefix(j.Broker, "amqp") {
		p, err := outboxamqp.NewPublisher(outboxamqp.Dial(j.Broker, amqp.Config{}), outboxamqp.Config{Logger: quiet})
		return p, func() {}, err
	}
	if strings.HasPrefix(j.Broker, "nats") {
		conn, err := openNATS(j.Broker)
		if err != nil {
			return nil, nil, err
		}
		p, err := outboxnats.NewPublisher(conn, outboxnats.Config{Topic: destination})
		return p, conn.Close, err
	}
	client, err := openRedis(j.Broker)
	if err != nil {
		return nil, nil, err
	}
	p, err := outboxredis.NewPublisher(client, outboxredis.Config{Stream: destination})
	return p, func() { _ = client.Close() }, err
}

func openNATS(url string) (*nats.Conn, error) {
	return nats.Connect(url, nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(250*time.Millisecond),
		nats.PingInterval(2*time.Second), nats.MaxPingsOutstanding(2), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
}

func openRedis(url string) (*redis.Client, error) {
	opts, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	opts.ContextTimeoutEnabled = true
	return redis.NewClient(opts), nil
}

// crashPublisher kills the process at a point of publishing.
type crashPublisher struct {
	readyPublisher
	crash *crash
}

// Run runs the publisher's session, if it has one.
func (p crashPublisher) Run(ctx context.Context) error {
	if session, ok := p.readyPublisher.(driver.Service); ok {
		return session.Run(ctx)
	}
	<-ctx.Done()
	return nil
}

func (p crashPublisher) Publish(ctx context.Context, m driver.Message, done func(error)) {
	p.crash.pass("publishing")
	p.readyPublisher.Publish(ctx, m, func(err error) {
		if err == nil {
			p.crash.pass("confirmed")
		}
		done(err)
	})
}

// relayed is an outbox, and the messages that were written to it.
type relayed struct {
	t        *testing.T
	job      relayJob
	pool     *pgxpool.Pool
	messages *outboxpgx.Store
	sent     []uuid.UUID
	arrived  func() []uuid.UUID // all so far, including repeats
}

func newRelayed(t *testing.T, broker string) *relayed {
	t.Helper()
	url := pgtest.URL(t)
	r := &relayed{t: t, job: relayJob{Database: url, Broker: broker}, pool: pgtest.Pool(t, url, 4)}
	var err error
	r.messages, err = outboxpgx.New(r.pool, outboxpgx.Config{})
	must(t, err)
	must(t, r.messages.Migrate(t.Context()))
	return r
}

func relayOnRabbitMQ(t *testing.T) work {
	t.Helper()
	b := amqptest.New(t)
	r := newRelayed(t, b.URL)
	conn, err := amqp.Dial(b.URL)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	must(t, err)
	_, err = ch.QueueDeclare(destination, true, false, false, false, nil)
	must(t, err)
	var all []uuid.UUID
	r.arrived = func() []uuid.UUID {
		for {
			d, ok, err := ch.Get(destination, true)
			must(t, err)
			if !ok {
				return all
			}
			all = append(all, uuid.MustParse(d.MessageId))
		}
	}
	return r
}

func relayOnRedis(t *testing.T) work {
	t.Helper()
	url := redistest.URL(t)
	r := newRelayed(t, url)
	client := redistest.Client(t, url)
	r.arrived = func() (all []uuid.UUID) {
		entries, err := client.XRange(t.Context(), destination, "-", "+").Result()
		must(t, err)
		for _, e := range entries {
			all = append(all, uuid.MustParse(fmt.Sprint(e.Values["id"])))
		}
		return all
	}
	return r
}

// relayOnNATS starts a server, because the stream has the same name in every test.
func relayOnNATS(t *testing.T) work {
	t.Helper()
	url := testenv.Private(t, testenv.NATS).URL()
	r := newRelayed(t, url)
	conn, err := openNATS(url)
	must(t, err)
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	must(t, err)
	stream, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: destination, Subjects: []string{destination + ".>"}})
	must(t, err)
	r.arrived = func() (all []uuid.UUID) {
		info, err := stream.Info(t.Context())
		must(t, err)
		for seq := uint64(1); seq <= info.State.LastSeq; seq++ {
			m, err := stream.GetMsg(t.Context(), seq)
			must(t, err)
			all = append(all, uuid.MustParse(m.Header.Get(nats.MsgIdHdr)))
		}
		return all
	}
	return r
}

func (r *relayed) prepare() {
	r.t.Helper()
	const n = 20
	msgs := make([]outbox.Message, n) // with one key, so that all are in one batch, in order
	for i := range msgs {
		msgs[i] = outbox.Message{ID: ids.New(), Name: destination, Key: "key", Body: []byte("{}"), Route: outbox.Route{RoutingKey: destination}}
		r.sent = append(r.sent, msgs[i].ID)
	}
	must(r.t, pgx.BeginFunc(r.t.Context(), r.pool, func(tx pgx.Tx) error { return r.messages.Write(r.t.Context(), tx, msgs...) }))
}

func (r *relayed) spawn(c crash) *child {
	job := r.job
	job.Crash = c
	return spawn(r.t, "relay", job)
}

// finish relays the remaining messages. Then all have arrived, the first copies in order.
func (r *relayed) finish() {
	r.t.Helper()
	stop := beside(r.t, r.job.run)
	testenv.Eventually(r.t, func() error {
		var n int
		err := r.pool.QueryRow(r.t.Context(), `SELECT count(*) FROM holdfast_outbox`).Scan(&n)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d messages left in the outbox", n)
		}
		return err
	})
	stop()
	var firsts []uuid.UUID
	seen := map[uuid.UUID]bool{}
	for _, id := range r.arrived() {
		if !seen[id] {
			firsts = append(firsts, id)
		}
		seen[id] = true
	}
	if fmt.Sprint(firsts) != fmt.Sprint(r.sent) {
		r.t.Errorf("%d of %d messages arrived, or not in order", len(firsts), len(r.sent))
	}
}

const (
	// outage is long enough for every backoff to reach its maximum.
	outage = 15 * time.Second
	// promised is the time within which everything works again after an outage.
	promised = 10 * time.Second
)

// A relay and a consumer in default settings work again within 10 s after their broker is back, and no message
// has lost an attempt.
func TestRecovery_withinTenSeconds(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "lasts a minute and measures time")
	for _, kind := range []testenv.Kind{testenv.RabbitMQ, testenv.Redis, testenv.NATS} {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			t.Parallel()
			var extra []string
			if kind == testenv.Redis { // a kill loses nothing
				extra = []string{"--appendonly", "yes", "--appendfsync", "always"}
			}
			server := testenv.Private(t, kind, extra...)
			proxy := testenv.NewProxy(t, server.URL())
			l := newLine(t, kind, proxy.URL())
			for _, fault := range []struct {
				name         string
				strike, heal func() error
			}{
				{"server killed", server.Kill, func() error { return server.Start(t.Context()) }},
				{"server paused", server.Pause, server.Resume},
				{"network cut", proxied(proxy.Cut), proxied(proxy.Heal)},
				{"network silent", proxied(proxy.Pause), proxied(proxy.Heal)},
				{"connections silent", proxied(proxy.SilenceConnections), proxied(proxy.Heal)},
			} {
				l.write(20)
				testenv.Eventually(t, l.works)
				must(t, fault.strike())
				for range 20 {
					l.write(1)
					time.Sleep(outage / 20)
				}
				must(t, fault.heal())
				healed := time.Now()
				l.write(1)
				testenv.Eventually(t, l.relays)
				relay := time.Since(healed)
				testenv.Eventually(t, l.works)
				consumer := time.Since(healed)
				t.Logf("%-20s relay %4.1f s, consumer %4.1f s", fault.name, relay.Seconds(), consumer.Seconds())
				if relay > promised || consumer > promised {
					t.Errorf("%s: the relay works after %v, the consumer after %v; the promise is %v", fault.name, relay, consumer, promised)
				}
			}
			l.noLetters()
		})
	}
}

func proxied(do func()) func() error {
	return func() error {
		do()
		return nil
	}
}

// line is an outbox, a relay, a broker and a consumer.
type line struct {
	t             *testing.T
	relays, works func() error // nil: all are ready, and no message waits for the relay or the consumer
	write         func(n int)
	noLetters     func()
}

func newLine(t *testing.T, kind testenv.Kind, broker string) *line {
	t.Helper()
	pool := pgtest.New(t)
	messages, err := outboxpgx.New(pool, outboxpgx.Config{Logger: quiet})
	must(t, err)
	must(t, messages.Migrate(t.Context()))
	var written, handled atomic.Int64
	mux := inbox.NewMux()
	must(t, inbox.Handle(mux, destination, func(context.Context, struct{}) error {
		handled.Add(1)
		return nil
	}))
	p, c := brokerOf(t, kind, broker, mux)
	must(t, c.Setup(t.Context()))
	relay, err := outbox.NewRelay(messages, p, outbox.RelayConfig{Logger: quiet})
	must(t, err)
	beside(t, relay.Run)
	beside(t, c.Run)
	l := &line{t: t}
	l.write = func(n int) {
		t.Helper()
		must(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			for range n {
				m := outbox.Message{Name: destination, Body: []byte("{}"), Route: outbox.Route{RoutingKey: destination}}
				if err := messages.Write(t.Context(), tx, m); err != nil {
					return err
				}
			}
			return nil
		}))
		written.Add(int64(n))
	}
	l.relays = func() error {
		var n int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox`).Scan(&n)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d messages left in the outbox", n)
		}
		return errors.Join(err, p.Ready(t.Context()), relay.Ready(t.Context()))
	}
	l.works = func() error {
		if handled.Load() < written.Load() {
			return fmt.Errorf("%d of %d messages were processed", handled.Load(), written.Load())
		}
		return errors.Join(l.relays(), c.Ready(t.Context()))
	}
	l.noLetters = func() {
		t.Helper()
		var n int
		must(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox_dead`).Scan(&n))
		stats, err := c.Stats(t.Context())
		must(t, err)
		for class, dead := range stats.Dead {
			if dead > 0 {
				t.Errorf("%d dead letters of the inbox, of class %s", dead, class)
			}
		}
		if n > 0 {
			t.Errorf("%d dead letters of the outbox", n)
		}
	}
	return l
}

type readyConsumer interface {
	consumer
	Ready(ctx context.Context) error
}

type readyPublisher interface {
	driver.Publisher
	Ready(ctx context.Context) error
}

// brokerOf returns publisher and consumer in default settings.
func brokerOf(t *testing.T, kind testenv.Kind, url string, mux *inbox.Mux) (readyPublisher, readyConsumer) {
	t.Helper()
	cfg := inbox.ConsumerConfig{Logger: quiet}
	if kind == testenv.RabbitMQ {
		p, err := outboxamqp.NewPublisher(outboxamqp.Dial(url, amqp.Config{}), outboxamqp.Config{Logger: quiet})
		must(t, err)
		c, err := inboxamqp.NewConsumer(inboxamqp.Dial(url, amqp.Config{}), inboxamqp.Queue{Name: destination}, mux, cfg)
		must(t, err)
		return p, c
	}
	if kind == testenv.NATS {
		conn, err := openNATS(url)
		must(t, err)
		t.Cleanup(conn.Close)
		p, err := outboxnats.NewPublisher(conn, outboxnats.Config{Topic: destination})
		must(t, err)
		c, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: destination}, mux, cfg)
		must(t, err)
		return p, c
	}
	client, err := openRedis(url)
	must(t, err)
	t.Cleanup(func() { _ = client.Close() })
	p, err := outboxredis.NewPublisher(client, outboxredis.Config{Stream: destination})
	must(t, err)
	c, err := inboxredis.NewConsumer(client, inboxredis.Stream{Name: destination}, mux, cfg)
	must(t, err)
	return p, c
}
