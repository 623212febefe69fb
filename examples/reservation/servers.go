package main

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	shopConns   = 16 // for requests
	workerConns = 10 // for relay, consumer and sweeper
	redisConns  = 64
	// redisTimeout bounds the wait for an answer of Redis, unless the address has a read_timeout. The limiter has two pipelines at a time: both may wait for it
	// twice until connections that have fallen silent are gone.
	redisTimeout = 2 * time.Second
	// heartbeat bounds how long the broker keeps messages for a consumer that has vanished: three of them at most.
	// The client gives a broker up that sends nothing for one and a half.
	heartbeat = 2 * time.Second
)

// servers are the clients of the three servers. None connects before it is used.
type servers struct {
	// shop serves requests, workers everything behind them: neither takes the other's connections.
	shop, workers *pgxpool.Pool
	redis         redis.UniversalClient
	dial          func(ctx context.Context) (*amqp.Connection, error) // RabbitMQ
	broker        string
	// farewell is said to Redis before the connections end. nil: nothing.
	farewell func(context.Context) error
}

func newServers(cfg config) (*servers, error) {
	redis, err := newRedis(cfg.redisURL)
	if err != nil {
		return nil, fmt.Errorf("REDIS_URL: %w", err)
	}
	shop, err := newPool(cfg.databaseURL, shopConns, map[string]string{
		// A sequential scan, which the planner prefers on small tables, takes a predicate lock on the
		// whole table: at SERIALIZABLE any two holds would then conflict, of whatever seats and events.
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
	return &servers{
		shop: shop, workers: workers, redis: redis, broker: cfg.broker,
		dial: dialAny(strings.Split(cfg.amqpURL, ","), amqp.Config{Heartbeat: heartbeat, Properties: properties}),
	}, nil
}

// newRedis is a client of one server, or of a Redis Cluster where the address names more nodes of it: redis://a:1?addr=b:1&addr=c:1.
func newRedis(address string) (redis.UniversalClient, error) {
	logging.Disable() // of go-redis, in a form of its own: every error comes back to the caller, too
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
	options.ContextTimeoutEnabled = true // a server that hangs is waited for as long as the caller says, not longer
	return redis.NewClient(options), nil
}

// dialAny connects to the first node of a cluster that answers, from one on that is chosen at random. Each gets its part of
// the time that there is, so that a silent one leaves some for the others.
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

// partOf is a context with one of so many parts of the time that is left.
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

// checks ask the servers that a role cannot work without. None asks the broker: the relay and the consumer know best
// whether they reach it, and requests are served while it is down.
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

// pings ask each server whether it answers.
func (s *servers) pings() []operator.Server {
	all := []operator.Server{
		{Name: "Postgres", Ping: s.workers.Ping, Connections: operator.PostgresConnections(s.workers)},
		{Name: "Redis", Ping: s.pingRedis, Connections: operator.RedisConnections(s.redisClients)},
	}
	if s.broker == brokerRabbitMQ {
		all = append(all, operator.Server{Name: "RabbitMQ", Ping: s.pingRabbitMQ})
	}
	return all
}

// close ends all connections, but waits for servers that do not answer no longer than closeTimeout.
func (s *servers) close() {
	var closing sync.WaitGroup
	closing.Go(s.shop.Close)
	closing.Go(s.workers.Close)
	closing.Go(func() {
		if s.farewell != nil {
			ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
			defer cancel()
			_ = s.farewell(ctx) // nobody is left to try again
		}
		_ = s.redis.Close() // nothing is pending on it
	})
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

// startTimeout is how long a process waits for a Postgres that is starting, too.
const startTimeout = 60 * time.Second
