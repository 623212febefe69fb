package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	shopConns   = 16 // for requests
	workerConns = 10 // for relay, consumer and sweeper
	redisConns  = 64
	// redisTimeout bounds the wait for an answer of Redis, unless the address has a read_timeout. The limiter has two
	// pipelines at a time. Both may wait twice until silent connections are closed.
	redisTimeout = 2 * time.Second
	// heartbeat bounds how long the broker keeps messages for a vanished consumer: at most three heartbeats.
	// The client gives up a broker that sends nothing for one and a half heartbeats.
	heartbeat = 2 * time.Second
	// natsPing is the time between two pings of NATS. The client gives up a server that leaves two without an answer.
	natsPing = 2 * time.Second
	// natsWait is the time between two attempts to connect to NATS.
	natsWait = 250 * time.Millisecond
)

// servers are the clients of the three servers. Each connects on first use, except the one of NATS.
type servers struct {
	// shop is for requests, workers for all other work: neither uses the other's connections.
	shop, workers *pgxpool.Pool
	redis         redis.UniversalClient
	dial          func(ctx context.Context) (*amqp.Connection, error) // RabbitMQ
	nats          *nats.Conn                                          // nil: another broker
	broker        string
	// farewell is called before the connections to Redis close. nil: nothing.
	farewell func(context.Context) error
}

func newServers(cfg config) (*servers, error) {
	redis, err := newRedis(cfg.redisURL)
	if err != nil {
		return nil, fmt.Errorf("REDIS_URL: %w", err)
	}
	shop, err := newPool(cfg.databaseURL, shopConns, map[string]string{
		// The planner prefers a sequential scan on small tables. The scan takes a predicate lock on the whole
		// table: at SERIALIZABLE any two holds would then conflict, whatever their seats and events.
		"enable_seqscan": "off",
	})
	if err != nil {
		return nil, err
	}
	workers, err := newPool(cfg.databaseURL, workerConns, nil)
	if err != nil {
		shop.Close()
		return nil, err
	}
	properties := amqp.NewConnectionProperties()
	properties.SetClientConnectionName("reservation " + cfg.role)
	s := &servers{
		shop: shop, workers: workers, redis: redis, broker: cfg.broker,
		dial: dialAny(strings.Split(cfg.amqpURL, ","), amqp.Config{Heartbeat: heartbeat, Properties: properties}),
	}
	if cfg.broker == brokerNATS {
		if s.nats, err = newNATS(cfg.natsURL, "reservation "+cfg.role); err != nil {
			s.close()
			return nil, fmt.Errorf("NATS_URL: %w", err)
		}
	}
	return s, nil
}

// newNATS returns a connection that connects to any server of a cluster, again and again until it is closed. It waits a
// moment for the first one.
func newNATS(addresses, name string) (*nats.Conn, error) {
	return nats.Connect(addresses, nats.Name(name), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(natsWait),
		nats.PingInterval(natsPing), nats.MaxPingsOutstanding(2), nats.FlusherTimeout(2*natsPing),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil { // not closed by this process
				slog.Warn("nats: connection lost", slog.Any("error", err))
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) { slog.Info("nats: connected again") }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			slog.Warn("nats: server reported an error", slog.Any("error", err))
		}))
}

// newRedis returns a client of one server, or of a Redis Cluster if the address has more nodes: redis://a:1?addr=b:1&addr=c:1.
func newRedis(address string) (redis.UniversalClient, error) {
	logging.Disable() // of go-redis, in its own format; callers get all errors anyway
	if u, err := url.Parse(address); err == nil && u.Query().Has("addr") {
		options, err := redis.ParseClusterURL(address)
		if err != nil {
			return nil, err
		}
		options.PoolSize, options.ContextTimeoutEnabled = redisConns, true
		options.ReadTimeout = cmp.Or(options.ReadTimeout, redisTimeout)
		return redis.NewClusterClient(options), nil
	}
	options, err := redis.ParseURL(address)
	if err != nil {
		return nil, err
	}
	options.PoolSize = redisConns
	options.ReadTimeout = cmp.Or(options.ReadTimeout, redisTimeout)
	options.ContextTimeoutEnabled = true // the caller's context bounds the wait for a hanging server
	return redis.NewClient(options), nil
}

// dialAny connects to the first node of a cluster that answers, starting with a random one. Each node gets a share of the
// remaining time, so that a silent one leaves some for the others.
func dialAny(addresses []string, cfg amqp.Config) func(ctx context.Context) (*amqp.Connection, error) {
	dials := make([]func(context.Context) (*amqp.Connection, error), len(addresses))
	for i, address := range addresses {
		dials[i] = outboxamqp.Dial(address, cfg)
	}
	return func(ctx context.Context) (conn *amqp.Connection, err error) {
		first := rand.IntN(len(dials))
		for i := range dials {
			attempt, cancel := partOf(ctx, len(dials)-i)
			conn, err = dials[(first+i)%len(dials)](attempt)
			cancel()
			if err == nil {
				return conn, nil
			}
		}
		return nil, err
	}
}

// partOf returns a context with one of parts shares of the remaining time.
func partOf(ctx context.Context, parts int) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(deadline)/time.Duration(parts))
}

func newPool(url string, conns int32, settings map[string]string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("DATABASE_URL: %w", err)
	}
	cfg.MaxConns = conns
	for name, value := range settings {
		cfg.ConnConfig.RuntimeParams[name] = value
	}
	txretry.PreparePool(cfg)
	return pgxpool.NewWithConfig(context.Background(), cfg)
}

// checks returns checks of the servers that a role cannot work without. None checks the broker: the relay and the consumer
// report it by themselves, and requests are served while it is down.
func (s *servers) checks(role string) map[string]func(context.Context) error {
	checks := map[string]func(context.Context) error{}
	if role != roleAPI {
		checks["postgres of workers"] = s.workers.Ping
	}
	if role == roleAPI || role == roleAll {
		checks["postgres"], checks["redis"] = s.shop.Ping, s.pingRedis
	}
	return checks
}

func (s *servers) pingRedis(ctx context.Context) error { return s.redis.Ping(ctx).Err() }

func (s *servers) redisClients(ctx context.Context) (string, error) {
	return s.redis.ClientList(ctx).Result()
}

func (s *servers) pingRabbitMQ(ctx context.Context) error {
	conn, err := s.dial(ctx)
	if err != nil {
		return err
	}
	return conn.CloseDeadline(time.Now().Add(closeTimeout))
}

func (s *servers) pingNATS(ctx context.Context) error {
	if !s.nats.IsConnected() {
		return cmp.Or(s.nats.LastError(), nats.ErrDisconnected)
	}
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	return s.nats.FlushWithContext(ctx)
}

// pings returns all servers, each with a ping.
func (s *servers) pings() []operator.Server {
	all := []operator.Server{
		{Name: "Postgres", Ping: s.workers.Ping, Connections: operator.PostgresConnections(s.workers)},
		{Name: "Redis", Ping: s.pingRedis, Connections: operator.RedisConnections(s.redisClients)},
	}
	switch s.broker {
	case brokerRabbitMQ:
		all = append(all, operator.Server{Name: "RabbitMQ", Ping: s.pingRabbitMQ})
	case brokerNATS:
		all = append(all, operator.Server{Name: "NATS", Ping: s.pingNATS})
	}
	return all
}

// close closes all connections. It waits at most closeTimeout for servers that do not answer.
func (s *servers) close() {
	var closing sync.WaitGroup
	closing.Go(s.shop.Close)
	closing.Go(s.workers.Close)
	closing.Go(func() {
		if s.farewell != nil {
			ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
			defer cancel()
			_ = s.farewell(ctx) // there is no time to try again
		}
		_ = s.redis.Close() // nothing is pending on it
	})
	if s.nats != nil {
		closing.Go(s.nats.Close)
	}
	closed := make(chan struct{})
	go func() {
		closing.Wait()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(closeTimeout):
	}
}

// startTimeout bounds how long a process waits for Postgres, which may be starting, too.
const startTimeout = 60 * time.Second

// The images of compose.yaml.
const (
	postgresImage = "postgres:17-alpine"
	redisImage    = "redis:8.0-alpine"
	rabbitImage   = "rabbitmq:4.0-management-alpine"
	natsImage     = "nats:2.12-alpine"
)

const containersTimeout = 5 * time.Minute // images may have to be pulled first

// containers are the servers that this process has started for itself.
type containers []testcontainers.Container

// startContainers starts one server of each kind that is needed, and puts their addresses into cfg.
func startContainers(ctx context.Context, cfg *config) (_ containers, err error) {
	ctx, cancel := context.WithTimeout(ctx, containersTimeout)
	defer cancel()
	if err := dockerAnswers(ctx); err != nil {
		return nil, fmt.Errorf("-backend=containers needs a Docker engine that answers: %w", err)
	}
	var started containers
	defer func() {
		if err != nil {
			started.stop()
		}
	}()
	start := func(name, port, url string, request testcontainers.ContainerRequest) (string, error) {
		slog.InfoContext(ctx, "starting container", slog.String("image", request.Image))
		request.ExposedPorts = []string{port}
		c, err := testcontainers.GenericContainer(ctx, testcontainers.GenericContainerRequest{
			ContainerRequest: request, Started: true,
		})
		if c != nil {
			started = append(started, c)
		}
		if err != nil {
			return "", fmt.Errorf("start %s: %w", name, err)
		}
		endpoint, err := c.PortEndpoint(ctx, port, "")
		if err != nil {
			return "", fmt.Errorf("start %s: %w", name, err)
		}
		return fmt.Sprintf(url, endpoint), nil
	}

	cfg.databaseURL, err = start("Postgres", "5432/tcp", "postgres://postgres:postgres@%s/postgres?sslmode=disable",
		testcontainers.ContainerRequest{
			Image: postgresImage,
			Env:   map[string]string{"POSTGRES_PASSWORD": "postgres"},
			// The server restarts after its first start has created the database.
			WaitingFor: wait.ForLog("ready to accept connections").WithOccurrence(2),
		})
	if err != nil {
		return nil, err
	}
	cfg.redisURL, err = start("Redis", "6379/tcp", "redis://%s/0", testcontainers.ContainerRequest{
		Image: redisImage, WaitingFor: wait.ForLog("Ready to accept connections"),
	})
	if err != nil {
		return nil, err
	}
	switch cfg.broker {
	case brokerRabbitMQ:
		cfg.amqpURL, err = start("RabbitMQ", "5672/tcp", "amqp://guest:guest@%s/", testcontainers.ContainerRequest{
			Image: rabbitImage, WaitingFor: wait.ForLog("Server startup complete"),
		})
	case brokerNATS:
		cfg.natsURL, err = start("NATS", "4222/tcp", "nats://%s", testcontainers.ContainerRequest{
			Image: natsImage, Cmd: []string{"-js"}, WaitingFor: wait.ForLog("Server is ready"),
		})
	}
	if err != nil {
		return nil, err
	}
	return started, nil
}

// dockerAnswers checks Docker before anything is started, because the library panics without an engine.
func dockerAnswers(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return err
	}
	defer provider.Close()
	return provider.Health(ctx)
}

// stop removes the containers, also during a shutdown.
func (c containers) stop() {
	for _, container := range c {
		// The library's own reaper removes a remaining one after this process has ended.
		_ = testcontainers.TerminateContainer(container)
	}
}

// The brokers.
const (
	brokerRabbitMQ = "rabbitmq"
	brokerRedis    = "redis"
	brokerNATS     = "nats"
)

// trialWorkers is how many messages a consumer with -trials has in flight.
const trialWorkers = 8

// consumer is the part of a consumer that the shop uses, on any broker.
type consumer interface {
	runner
	Setup(ctx context.Context) error
	Check(ctx context.Context) error
	DeadLetters() inbox.DeadLetters
	Stats(ctx context.Context) (inbox.Stats, error)
}

// broker carries the messages of the shop.
type broker struct {
	publisher driver.Publisher
	consumer  consumer
	setup     []func(context.Context) error
}

// newBroker makes the parts for a broker. On Redis and on NATS the messages are in a stream, which one consumer group or
// durable consumer reads. h counts the messages.
func newBroker(cfg config, s *servers, p inbox.Processor, h *handled) broker {
	common := inbox.ConsumerConfig{Name: messages.Queue, Batch: 50, ShutdownTimeout: stopTimeout - closeTimeout}
	if cfg.trials { // the messages of a slow consumer wait at the broker, where they are counted
		common.Batch, common.Concurrency, common.Prefetch = 1, trialWorkers, trialWorkers
	}
	switch cfg.broker {
	case brokerNATS:
		common.Name = messages.Durable
		consumer := must(inboxnats.NewConsumer(s.nats, inboxnats.Stream{Name: messages.Exchange}, p, common))
		return broker{
			publisher: countedNATS{must(outboxnats.NewPublisher(s.nats, outboxnats.Config{Topic: messages.Exchange})), h},
			consumer:  consumer, setup: []func(context.Context) error{consumer.Setup},
		}
	case brokerRedis:
		consumer := must(inboxredis.NewConsumer(s.redis, inboxredis.Stream{Name: messages.Exchange}, p, common))
		return broker{
			publisher: countedRedis{must(outboxredis.NewPublisher(s.redis, outboxredis.Config{Stream: messages.Exchange})), h},
			consumer:  consumer, setup: []func(context.Context) error{consumer.Setup},
		}
	}
	publisher := must(outboxamqp.NewPublisher(s.dial, outboxamqp.Config{Exchange: messages.Exchange}))
	consumer := must(inboxamqp.NewConsumer(s.dial, inboxamqp.Queue{
		Name: messages.Queue, Bindings: []inboxamqp.Binding{{Exchange: messages.Exchange, Key: messages.Binding}},
	}, p, common))
	return broker{publisher: countedAMQP{publisher, h}, consumer: consumer, setup: []func(context.Context) error{publisher.Setup, consumer.Setup}}
}
