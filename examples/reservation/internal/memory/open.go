package memory

import (
	"errors"
	"log/slog"
	"time"

	"github.com/google/uuid"

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
	// Wire leads to the servers. nil means the switches of Demo.
	Wire Wire
	// Flow counts what goes through the shop. Optional.
	Flow *flow.Tracker
	// Observe is told of what has committed, in that order. Optional.
	Observe Observer
	// Rand is the Rand of all parts. Optional.
	Rand func() float64
	// MaxCrashes is that of relays and consumers. Optional.
	MaxCrashes int
}

// Observer has functions that are called for commits, for messages at the broker and for faults of transactions, also where
// the reply is lost. Each may be nil, and must not block.
type Observer struct {
	Wrote     func(m outbox.Message, at time.Time)   // a message was stored with its change, which was made at that time
	Published func(id uuid.UUID)                     // the broker took a message, perhaps once more
	Learned   func(id uuid.UUID, status string)      // the read model took in a message
	Struck    func(attempt int, f txretrytest.Fault) // a fault of Config.Faults has happened
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

	cfg Config
}

// Open puts the parts together.
func Open(cfg Config) (*Parts, error) {
	d := &Demo{
		Postgres: &Server{name: PostgresServer}, Redis: &Server{name: RedisServer}, RabbitMQ: &Server{name: RabbitMQServer},
		broker: inboxtest.NewBroker(), outbox: outboxtest.New(),
	}
	if cfg.Wire == nil {
		cfg.Wire = d
	}
	tx := transactor{txretrytest.New(txretrytest.Config{
		Script: cfg.Faults, Struck: cfg.Observe.Struck,
		Retry: txretry.Config{Logger: cfg.Logger, Rand: cfg.Rand},
	}), cfg.Wire}
	counters, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	p := &Parts{
		Keys:    newKeys(cfg.Wire),
		Limiter: &Limiter{counters, cfg.Wire},
		Outbox:  d.outbox, Broker: d.broker, Demo: d, cfg: cfg,
	}
	p.Shop = &Shop{Store: newStore(tx, cfg), outbox: observed{p.Outbox, cfg.Observe.Wrote}}
	errs := [7]error{err}
	p.Shop.once, errs[1] = idempotencytest.New(tx, idempotencypgx.Config{Gate: p.Keys, Logger: cfg.Logger})
	p.Inbox, errs[2] = newInbox(tx, p.Shop.Store)
	errs[3] = p.Shop.addHolds()
	p.Holds = p.Shop.holds
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	p.Consumer, errs[4] = p.NewConsumer(d.RabbitMQ.fault)
	d.consumer = p.Consumer
	p.Relay, errs[5] = p.NewRelay()
	p.Sweeper, errs[6] = p.NewSweeper()
	return p, errors.Join(errs[:]...)
}

func newInbox(tx txretry.Transactor, store *Store) (*inboxpgx.Store, error) {
	inbox, err := inboxtest.New(tx, "stats", inboxpgx.Config{})
	if err != nil {
		return nil, err
	}
	return inbox, messages.Listen(inbox, store.learn)
}

// NewRelay returns a relay beside that of the Parts, as one more process has it.
func (p *Parts) NewRelay() (*outbox.Relay, error) {
	return outbox.NewRelay(source{p.Outbox, p.cfg.Wire}, publisher{p.Broker, p.cfg},
		outbox.RelayConfig{MaxCrashes: p.cfg.MaxCrashes, Logger: p.cfg.Logger, Rand: p.cfg.Rand})
}

// NewConsumer returns a consumer beside that of the Parts, as one more process has it, whose steps meet the fault.
func (p *Parts) NewConsumer(fault func(inboxtest.Step, *inbox.Message) inboxtest.Outcome) (*inboxtest.Consumer, error) {
	return inboxtest.NewConsumer(p.Broker, messages.Queue, &processor{p.Inbox, p.Demo, p.cfg.Flow}, inboxtest.Config{
		ConsumerConfig: inbox.ConsumerConfig{MaxCrashes: p.cfg.MaxCrashes, Logger: p.cfg.Logger, Rand: p.cfg.Rand},
		Fault:          fault,
	})
}

// NewSweeper returns a sweeper beside that of the Parts, as one more process has it.
func (p *Parts) NewSweeper() (*expiry.Sweeper, error) {
	return expiry.NewSweeper(p.Holds, expiry.SweeperConfig{Schedule: p.cfg.Schedule, Logger: p.cfg.Logger, Rand: p.cfg.Rand})
}
