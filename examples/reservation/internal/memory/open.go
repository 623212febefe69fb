package memory

import (
	"errors"
	"log/slog"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/expiry"
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
}

// Parts is everything that the shop consists of in one process.
type Parts struct {
	Shop    *Shop
	Keys    *idempotencytest.Store
	Limiter *ratelimit.Memory
	Outbox  *outboxtest.Store

	// These have to be run, but for the broker.
	Relay    *outbox.Relay
	Consumer *inboxtest.Consumer
	Sweeper  *expiry.Sweeper
	Broker   *inboxtest.Broker // between relay and consumer
}

// Open puts the parts together.
func Open(cfg Config) (*Parts, error) {
	tx := txretrytest.New(txretrytest.Config{
		Script: cfg.Faults,
		Retry:  txretry.Config{Logger: cfg.Logger},
	})
	p := &Parts{Keys: idempotencytest.NewStore(), Outbox: outboxtest.New(), Broker: inboxtest.NewBroker()}
	p.Shop = &Shop{Store: newStore(tx), outbox: p.Outbox}
	var errs [5]error
	p.Shop.once, errs[0] = idempotencytest.New(tx, idempotencypgx.Config{Gate: p.Keys, Logger: cfg.Logger})
	p.Limiter, errs[1] = ratelimit.NewMemory(ratelimit.MemoryConfig{})
	p.Consumer, errs[2] = newConsumer(tx, p, cfg)
	p.Relay, errs[3] = outbox.NewRelay(p.Outbox, p.Broker, outbox.RelayConfig{Logger: cfg.Logger})
	p.Sweeper, errs[4] = newSweeper(p.Shop, cfg)
	return p, errors.Join(errs[:]...)
}

func newConsumer(tx txretry.Transactor, p *Parts, cfg Config) (*inboxtest.Consumer, error) {
	processor, err := inboxtest.New(tx, "stats", inboxpgx.Config{})
	if err != nil {
		return nil, err
	}
	if err := messages.Listen(processor, p.Shop.learn); err != nil {
		return nil, err
	}
	return inboxtest.NewConsumer(p.Broker, messages.Queue, processor, inboxtest.Config{
		ConsumerConfig: inbox.ConsumerConfig{Logger: cfg.Logger},
	})
}

func newSweeper(shop *Shop, cfg Config) (*expiry.Sweeper, error) {
	if err := shop.addHolds(); err != nil {
		return nil, err
	}
	return expiry.NewSweeper(shop.holds, expiry.SweeperConfig{Schedule: cfg.Schedule, Logger: cfg.Logger})
}
