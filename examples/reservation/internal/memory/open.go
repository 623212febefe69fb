package memory

import (
	"errors"
	"log/slog"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Config configures Open. The zero value works.
type Config struct {
	Schedule string       // of the sweeper; empty means every half hour
	Logger   *slog.Logger // nil means slog.Default()
	// Faults are those of the transactions, in their order, for tests.
	Faults []txretrytest.Fault
	// Flow counts what goes through the shop. Optional.
	Flow *flow.Tracker
}

// Parts is everything that the shop consists of in one process.
type Parts struct {
	Shop    *Shop
	Keys    *Keys
	Limiter *Limiter
	Outbox  *outboxtest.Store
	Holds   *expirytest.Store
	Inbox   *inboxpgx.Store
	Demo    *Demo

	// These have to be run, but for the broker.
	Relay    *outbox.Relay
	Consumer *inboxtest.Consumer
	Sweeper  *expiry.Sweeper
	Broker   *inboxtest.Broker // between relay and consumer
}

// Open puts the parts together.
func Open(cfg Config) (*Parts, error) {
	d := &Demo{
		Postgres: &Server{name: "postgres"}, Redis: &Server{name: "redis"}, RabbitMQ: &Server{name: "rabbitmq"},
		broker: inboxtest.NewBroker(), outbox: outboxtest.New(),
	}
	tx := transactor{txretrytest.New(txretrytest.Config{
		Script: cfg.Faults,
		Retry:  txretry.Config{Logger: cfg.Logger},
	}), d.Postgres}
	counters, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	p := &Parts{
		Keys:    &Keys{idempotencytest.NewStore(), d.Redis},
		Limiter: &Limiter{counters, d.Redis},
		Outbox:  d.outbox, Broker: d.broker, Demo: d,
	}
	p.Shop = &Shop{Store: newStore(tx, cfg.Flow), outbox: p.Outbox}
	errs := [5]error{err}
	p.Shop.once, errs[1] = idempotencytest.New(tx, idempotencypgx.Config{Gate: p.Keys, Logger: cfg.Logger})
	p.Consumer, errs[2] = newConsumer(tx, p, cfg)
	d.consumer = p.Consumer
	p.Relay, errs[3] = outbox.NewRelay(source{p.Outbox, d.Postgres}, publisher{p.Broker, d.RabbitMQ, cfg.Flow},
		outbox.RelayConfig{Logger: cfg.Logger})
	p.Sweeper, errs[4] = newSweeper(p.Shop, cfg)
	p.Holds = p.Shop.holds
	return p, errors.Join(errs[:]...)
}

func newConsumer(tx txretry.Transactor, p *Parts, cfg Config) (*inboxtest.Consumer, error) {
	store, err := inboxtest.New(tx, "stats", inboxpgx.Config{})
	if err != nil {
		return nil, err
	}
	if err := messages.Listen(store, p.Shop.learn); err != nil {
		return nil, err
	}
	p.Inbox = store
	return inboxtest.NewConsumer(p.Broker, messages.Queue, &processor{store, p.Demo, cfg.Flow}, inboxtest.Config{
		ConsumerConfig: inbox.ConsumerConfig{Logger: cfg.Logger},
		Fault:          p.Demo.RabbitMQ.fault,
	})
}

func newSweeper(shop *Shop, cfg Config) (*expiry.Sweeper, error) {
	if err := shop.addHolds(); err != nil {
		return nil, err
	}
	return expiry.NewSweeper(shop.holds, expiry.SweeperConfig{Schedule: cfg.Schedule, Logger: cfg.Logger})
}
