package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/txretry"
)

// maxConns bounds the program's connections to Postgres: a relay needs two of them.
const maxConns = 6

// service makes the parts that the file lists. It does not connect to a server.
type service struct {
	getenv  func(string) string
	cfg     operator.Config
	errs    []error
	pool    *pgxpool.Pool
	manager *txretry.Manager
	redis   *redis.Client
	dialing func(context.Context) (*amqp.Connection, error)
}

// open makes the parts that the file lists, and the clients that they need.
func open(f file, getenv func(string) string) (operator.Config, func(), error) {
	s := &service{getenv: getenv, cfg: operator.Config{Program: program, TraceURL: f.TraceURL}}
	for _, e := range f.Outboxes {
		s.outbox(e)
	}
	for _, e := range f.Consumers {
		s.consumer(e)
	}
	for _, e := range f.Idempotency {
		s.idempotency(e)
	}
	for _, e := range f.Sweeps {
		s.sweep(e)
	}
	s.limits(f.Limits)
	if getenv("DATABASE_URL") != "" && s.postgres("log", "log") {
		log, err := operator.NewPostgresLog(s.pool)
		s.note("log", "", err)
		s.cfg.Log = log
		history, err := operator.NewPostgresHistory(s.pool)
		s.note("history", "", err)
		s.cfg.History = history
	}
	if err := errors.Join(s.errs...); err != nil {
		s.close()
		return operator.Config{}, nil, err
	}
	return s.cfg, s.close, nil
}

func (s *service) close() {
	if s.pool != nil {
		s.pool.Close()
	}
	if s.redis != nil {
		_ = s.redis.Close() // nothing is pending on it
	}
}

// note collects the errors of all entries, so that they are reported together. It reports whether err is nil.
func (s *service) note(kind, name string, err error) bool {
	if err != nil {
		s.errs = append(s.errs, fmt.Errorf("%s %q: %w", kind, name, err))
	}
	return err == nil
}

// said reports whether a retention is set. It has no default: a wrong one deletes rows that the service still needs.
func (s *service) said(kind, name string, retention *time.Duration, usual time.Duration) bool {
	if retention == nil {
		return s.note(kind, name, fmt.Errorf("set retention to the service's own, which is %v by default: rows are deleted by it", usual))
	}
	return true
}

func (s *service) outbox(e outboxEntry) {
	const kind = "outbox"
	if !s.said(kind, e.Name, e.Retention, 0) || !s.postgres(kind, e.Name) {
		return
	}
	store, err := outboxpgx.New(s.pool, outboxpgx.Config{Schema: e.Schema, Table: e.Table, Retention: *e.Retention, DedupRetention: e.DedupRetention})
	if !s.note(kind, e.Name, err) {
		return
	}
	entry := operator.Outbox{Name: cmp.Or(e.Name, kind), Store: store}
	var publisher driver.Publisher
	switch {
	case e.Exchange != "" && e.Stream != "":
		s.note(kind, e.Name, errors.New("exchange and stream are both set"))
	case e.Exchange != "" && s.rabbitmq(kind, e.Name):
		publisher, err = outboxamqp.NewPublisher(s.dialing, outboxamqp.Config{Exchange: e.Exchange})
	case e.Stream != "" && s.redisClient(kind, e.Name):
		publisher, err = outboxredis.NewPublisher(s.redis, outboxredis.Config{Stream: e.Stream})
	}
	if !s.note(kind, e.Name, err) {
		return
	}
	if publisher != nil {
		entry.Relay, err = outbox.NewRelay(store, publisher, outbox.RelayConfig{})
		s.note(kind, e.Name, err)
		s.cfg.Parts = append(s.cfg.Parts, operator.Part{Name: entry.Name + ".publisher", Part: publisher})
	}
	s.cfg.Outboxes = append(s.cfg.Outboxes, entry)
}

func (s *service) consumer(e consumerEntry) {
	const kind = "consumer"
	entry := operator.Consumer{Name: e.Name}
	var processor inbox.Processor = inbox.NewMux()
	if e.Table != "" || e.ParkKeys {
		if !s.said(kind, e.Name, e.Retention, inboxdriver.DefaultRetention) || !s.postgres(kind, e.Name) {
			return
		}
		store, err := inboxpgx.New(s.manager, cmp.Or(e.Consumer, e.Name), inboxpgx.Config{Schema: e.Schema, Table: e.Table, Retention: *e.Retention})
		if !s.note(kind, e.Name, err) {
			return
		}
		processor, entry.Inbox = store, store
	}
	common := inbox.ConsumerConfig{
		Name: e.Name, Ordered: e.Ordered, ParkKeys: e.ParkKeys, Classes: e.Classes,
		DeadLetterPrefix: e.DeadLetterPrefix,
	}
	var err error
	switch {
	case (e.Queue == "") == (e.Stream == ""):
		err = errors.New("set queue (RabbitMQ) or stream (Redis)")
	case e.Queue != "" && s.rabbitmq(kind, e.Name):
		queue := inboxamqp.Queue{Name: e.Queue, Classic: e.Classic, Partitions: e.Partitions}
		for _, b := range e.Bindings {
			queue.Bindings = append(queue.Bindings, inboxamqp.Binding{Exchange: b.Exchange, Key: b.Key})
		}
		entry.Consumer, err = inboxamqp.NewConsumer(s.dialing, queue, processor, common)
	case e.Stream != "" && s.redisClient(kind, e.Name):
		common.Name = cmp.Or(e.Group, e.Name)
		entry.Consumer, err = inboxredis.NewConsumer(s.redis, inboxredis.Stream{Name: e.Stream, Partitions: e.Partitions}, processor, common)
	default:
		return // the address is missing or wrong, and noted
	}
	if s.note(kind, e.Name, err) {
		s.cfg.Consumers = append(s.cfg.Consumers, entry)
	}
}

func (s *service) idempotency(e idempotencyEntry) {
	const kind = "idempotency"
	if e.Prefix != "" || e.HashTag {
		s.idempotencyOnRedis(kind, e)
		return
	}
	if !s.postgres(kind, e.Name) {
		return
	}
	store, err := idempotencypgx.New(s.manager, idempotencypgx.Config{Schema: e.Schema, Table: e.Table})
	if s.note(kind, e.Name, err) {
		s.cfg.Parts = append(s.cfg.Parts, operator.Part{Name: cmp.Or(e.Name, kind), Part: store})
	}
}

func (s *service) idempotencyOnRedis(kind string, e idempotencyEntry) {
	if e.Table != "" || e.Schema != "" {
		s.note(kind, e.Name, errors.New("prefix (Redis) and table (Postgres) are two stores: make an entry for each"))
		return
	}
	if !s.redisClient(kind, e.Name) {
		return
	}
	store, err := idempotencyredis.New(s.redis, idempotencyredis.Config{Prefix: e.Prefix, HashTag: e.HashTag})
	if s.note(kind, e.Name, err) {
		s.cfg.Parts = append(s.cfg.Parts, operator.Part{Name: cmp.Or(e.Name, kind), Part: store})
	}
}

func (s *service) sweep(e sweepEntry) {
	const kind = "sweep"
	if !s.postgres(kind, e.Name) {
		return
	}
	store, err := expirypgx.New(s.manager, e.Table, expirypgx.Config{
		Schema: e.Schema, ID: e.ID, Deadline: e.Deadline, Status: e.Status, Active: e.Active, Expired: e.Expired, Where: e.Where,
	})
	if s.note(kind, e.Name, err) {
		s.cfg.Sweeps = append(s.cfg.Sweeps, operator.Sweep{Name: cmp.Or(e.Name, e.Table), Store: store})
	}
}

// algorithms are their names in a file.
var algorithms = map[string]ratelimit.Algorithm{
	"": ratelimit.SlidingWindow, "sliding": ratelimit.SlidingWindow, "bucket": ratelimit.TokenBucket, "fixed": ratelimit.FixedWindow,
}

// limits makes one part of all limits with the same prefix and tag. A limit with Keys is a part of its own.
func (s *service) limits(entries []limitEntry) {
	names := map[[2]string]string{} // of parts, by prefix and tag
	places := map[string]int{}      // of parts in s.cfg.Limiters
	for _, e := range entries {
		limit, limiter, ok := s.limit(e)
		if !ok {
			continue
		}
		keys := [2]string{e.Prefix, e.Tag}
		if names[keys] == "" {
			names[keys] = "limits"
			if n := len(names); n > 1 {
				names[keys] += fmt.Sprint("-", n)
			}
		}
		name := names[keys]
		if len(e.Keys) > 0 {
			s.cfg.Limiters = append(s.cfg.Limiters, operator.Limiter{Name: name + "." + e.Name, Limiter: limiter, Limits: []ratelimit.Limit{limit}, Keys: e.Keys})
			continue
		}
		i, known := places[name]
		if !known {
			i, places[name] = len(s.cfg.Limiters), len(s.cfg.Limiters)
			s.cfg.Limiters = append(s.cfg.Limiters, operator.Limiter{Name: name, Limiter: limiter})
		}
		s.cfg.Limiters[i].Limits = append(s.cfg.Limiters[i].Limits, limit)
	}
}

func (s *service) limit(e limitEntry) (limit ratelimit.Limit, limiter *ratelimitredis.Limiter, ok bool) {
	const kind = "limit"
	algorithm, known := algorithms[e.Algorithm]
	if !known {
		return limit, nil, s.note(kind, e.Name, fmt.Errorf("algorithm %.40q is none of sliding, bucket and fixed", e.Algorithm))
	}
	limit = ratelimit.Limit{Name: e.Name, Max: e.Max, Window: e.Window, Algorithm: algorithm, Burst: e.Burst}
	if !s.note(kind, e.Name, limit.Validate()) || !s.redisClient(kind, e.Name) {
		return limit, nil, false
	}
	limiter, err := ratelimitredis.New(s.redis, ratelimitredis.Config{Prefix: e.Prefix, Tag: e.Tag})
	return limit, limiter, s.note(kind, e.Name, err)
}

// address returns the address of a server for an entry. No error quotes it: it may contain a password.
func (s *service) address(variable, kind, name string, schemes ...string) (string, bool) {
	text := s.getenv(variable)
	if text == "" {
		return "", s.note(kind, name, fmt.Errorf("%s is not set", variable))
	}
	u, err := url.Parse(text)
	if err != nil || !slices.Contains(schemes, u.Scheme) {
		return "", s.note(kind, name, fmt.Errorf("%s is not an address that begins with %s://", variable, schemes[0]))
	}
	return text, true
}

func (s *service) postgres(kind, name string) bool {
	if s.pool != nil {
		return true
	}
	address, ok := s.address("DATABASE_URL", kind, name, "postgres", "postgresql")
	if !ok {
		return false
	}
	cfg, err := pgxpool.ParseConfig(address)
	if err != nil {
		return s.note(kind, name, errors.New("DATABASE_URL cannot be read"))
	}
	cfg.MaxConns = maxConns
	if cfg.ConnConfig.RuntimeParams["application_name"] == "" {
		cfg.ConnConfig.RuntimeParams["application_name"] = program
	}
	txretry.PreparePool(cfg)
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if !s.note(kind, name, err) {
		return false
	}
	manager, err := txretry.New(pool, txretry.Config{})
	if !s.note(kind, name, err) {
		pool.Close()
		return false
	}
	s.pool, s.manager = pool, manager
	s.cfg.Servers = append(s.cfg.Servers, operator.Server{Name: "Postgres", Ping: pool.Ping, Connections: operator.PostgresConnections(pool)})
	s.cfg.Parts = append(s.cfg.Parts, operator.Part{Name: "transactions", Part: manager})
	return true
}

func (s *service) redisClient(kind, name string) bool {
	if s.redis != nil {
		return true
	}
	address, ok := s.address("REDIS_URL", kind, name, "redis", "rediss")
	if !ok {
		return false
	}
	options, err := redis.ParseURL(address)
	if err != nil {
		return s.note(kind, name, errors.New("REDIS_URL cannot be read"))
	}
	logging.Disable() // of go-redis, in its own format; callers get all errors anyway
	options.ContextTimeoutEnabled = true
	s.redis = redis.NewClient(options)
	s.cfg.Servers = append(s.cfg.Servers, operator.Server{
		Name: "Redis", Ping: func(ctx context.Context) error { return s.redis.Ping(ctx).Err() },
		Connections: operator.RedisConnections(func(ctx context.Context) (string, error) { return s.redis.ClientList(ctx).Result() }),
	})
	return true
}

func (s *service) rabbitmq(kind, name string) bool {
	if s.dialing != nil {
		return true
	}
	address, ok := s.address("AMQP_URL", kind, name, "amqp", "amqps")
	if !ok {
		return false
	}
	properties := amqp.NewConnectionProperties()
	properties.SetClientConnectionName(program)
	s.dialing = outboxamqp.Dial(address, amqp.Config{Properties: properties})
	s.cfg.Servers = append(s.cfg.Servers, operator.Server{Name: "RabbitMQ", Ping: func(ctx context.Context) error {
		conn, err := s.dialing(ctx)
		if err != nil {
			return err
		}
		return conn.CloseDeadline(time.Now().Add(time.Second))
	}})
	return true
}
