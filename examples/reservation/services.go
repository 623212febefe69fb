package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/txretry"
)

// holdTable is the table whose rows expire.
const holdTable = "reservations"

// parts is everything that the shop consists of on real servers. Each role runs some of it.
type parts struct {
	servers *servers

	transactor *txretry.Manager // of requests

	shop    *postgres.Shop
	gate    *idempotencyredis.Store
	once    *idempotencypgx.Store
	limiter *ratelimitredis.Limiter

	messages  *outboxpgx.Store
	publisher *outboxamqp.Publisher
	relay     *outbox.Relay
	inbox     *inboxpgx.Store
	consumer  *inboxamqp.Consumer
	holds     *expirypgx.Store
	sweeper   *expiry.Sweeper
}

// newParts puts the parts together. Nothing is asked of a server yet.
func newParts(cfg config, s *servers, m *metrics, log *slog.Logger) (*parts, error) {
	p := &parts{servers: s}
	workers, err := newTransactor(s.workers, m, log)
	if err != nil {
		return nil, err
	}
	p.messages, err = outboxpgx.New(s.workers, outboxpgx.Config{Logger: log})
	if err != nil {
		return nil, err
	}
	return p, errors.Join(
		p.addSweeper(cfg, workers, m, log),
		p.addShop(m, log),
		p.addRelay(m, log),
		p.addConsumer(workers, m, log),
	)
}

// newTransactor runs transactions that are idle between two statements for milliseconds only. A process that has
// vanished in the middle of one keeps its locks for 5 s.
func newTransactor(pool *pgxpool.Pool, m *metrics, log *slog.Logger) (*txretry.Manager, error) {
	return txretry.New(pool, txretry.Config{IdleTimeout: 5 * time.Second, Logger: log, MeterProvider: m.provider})
}

// addShop adds what serves requests.
func (p *parts) addShop(m *metrics, log *slog.Logger) error {
	s := p.servers
	var err error
	if p.transactor, err = newTransactor(s.shop, m, log); err != nil {
		return err
	}
	if p.gate, err = idempotencyredis.New(s.redis, idempotencyredis.Config{}); err != nil {
		return err
	}
	if p.limiter, err = ratelimitredis.New(s.redis, ratelimitredis.Config{
		// Long enough for a crowd to take turns on the connections: a request that comes to nothing
		// for want of a quick answer would cost a buyer the seat.
		Timeout: 5 * time.Second,
		Logger:  log, MeterProvider: m.provider,
	}); err != nil {
		return err
	}
	if p.once, err = idempotencypgx.New(p.transactor, idempotencypgx.Config{Gate: p.gate, Logger: log}); err != nil {
		return err
	}
	p.shop = postgres.NewShop(s.shop, p.once, p.messages, p.holds)
	return nil
}

func (p *parts) addRelay(m *metrics, log *slog.Logger) (err error) {
	p.publisher, err = outboxamqp.NewPublisher(p.servers.dial, outboxamqp.Config{
		Exchange: messages.Exchange, Logger: log, MeterProvider: m.provider,
	})
	if err != nil {
		return err
	}
	p.relay, err = outbox.NewRelay(p.messages, p.publisher,
		outbox.RelayConfig{Logger: log, MeterProvider: m.provider})
	return err
}

func (p *parts) addConsumer(transactor txretry.Transactor, m *metrics, log *slog.Logger) (err error) {
	p.inbox, err = inboxpgx.New(transactor, "stats", inboxpgx.Config{Logger: log, MeterProvider: m.provider})
	if err != nil {
		return err
	}
	if err := postgres.Listen(p.inbox); err != nil {
		return err
	}
	p.consumer, err = inboxamqp.NewConsumer(p.servers.dial, messages.Queue, p.inbox, inboxamqp.Config{
		ConsumerConfig: inbox.ConsumerConfig{
			Batch: 50, ShutdownTimeout: stopTimeout - closeTimeout, Logger: log, MeterProvider: m.provider,
		},
		Bindings: []inboxamqp.Binding{{Exchange: messages.Exchange, Key: messages.Binding}},
	})
	return err
}

func (p *parts) addSweeper(cfg config, transactor txretry.Transactor, m *metrics, log *slog.Logger) (err error) {
	p.holds, err = expirypgx.New(transactor, holdTable, expirypgx.Config{
		Logger: log,
		Emit: func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
			return postgres.Swept(ctx, tx, p.messages, rows)
		},
	})
	if err != nil {
		return err
	}
	p.sweeper, err = expiry.NewSweeper(p.holds, expiry.SweeperConfig{
		Schedule: cfg.sweep, Logger: log, MeterProvider: m.provider,
	})
	return err
}

// prepare creates the tables and declares the topology. Many processes may do so at once.
func (p *parts) prepare(ctx context.Context, log *slog.Logger) error {
	if err := patiently(ctx, log, "migrate the database", p.migrate); err != nil {
		return err
	}
	return patiently(ctx, log, "declare exchange and queues", p.declare)
}

func (p *parts) migrate(ctx context.Context) error {
	pool := p.servers.workers
	for _, migrate := range []func() error{
		func() error { return p.messages.Migrate(ctx) },
		func() error { return p.inbox.Migrate(ctx) },
		func() error { return p.once.Migrate(ctx) },
		func() error { return postgres.Migrate(ctx, pool) },
	} {
		if err := migrate(); err != nil {
			return err
		}
	}
	return nil
}

func (p *parts) declare(ctx context.Context) error {
	if err := p.publisher.Setup(ctx); err != nil {
		return err
	}
	return p.consumer.Setup(ctx)
}

// openServices is the back end on real servers, with the services of the role.
func openServices(ctx context.Context, cfg config, m *metrics, log *slog.Logger) (*backend, error) {
	s, err := newServers(cfg)
	if err != nil {
		return nil, err
	}
	p, err := newParts(cfg, s, m, log)
	if err == nil {
		err = p.prepare(ctx, log)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return &backend{
		shop: p.shop, keys: p.once, limiter: p.limiter,
		services: p.services(cfg.role), checks: s.checks(cfg.role), close: s.close,
	}, nil
}

func (p *parts) services(role string) []service {
	sweeper := service{roleSweeper, p.sweeper.Run, p.sweeper.Ready}
	relay := service{roleRelay, p.relay.Run, p.relay.Ready}
	consumer := service{roleConsumer, p.consumer.Run, p.consumer.Ready}
	switch role {
	case roleAPI:
		return nil
	case roleRelay:
		return []service{relay}
	case roleConsumer:
		return []service{consumer}
	case roleSweeper:
		return []service{sweeper}
	default:
		return []service{sweeper, relay, consumer}
	}
}
