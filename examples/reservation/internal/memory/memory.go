// Package memory is the shop in this process: the ports of package booking on
// the fakes of the libraries. Nothing survives the process, and nothing has to be
// installed. Clients see the same as with real servers: messages go through an
// outbox, a relay, a broker and an inbox here, too.
package memory

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/idempotency"
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
	// Faults are injected into the transactions, in this order, for tests.
	Faults []txretrytest.Fault
	// Wire is between the shop and its servers. nil means the switches of Demo.
	Wire Wire
	// Flow counts the work of the shop. Optional.
	Flow *flow.Tracker
	// Observe has functions that are called in the order of the commits. Optional.
	Observe Observer
	// Rand is the random source of all parts. Optional.
	Rand func() float64
	// MaxCrashes is the setting of relays and consumers. Optional.
	MaxCrashes int
}

// Observer has functions that are called for commits, for messages at the broker and for faults of transactions, even if
// the reply is lost. Each may be nil, and must not block.
type Observer struct {
	Wrote     func(m outbox.Message, at time.Time)   // a message was stored with a change of that time
	Published func(id uuid.UUID)                     // the broker stored a message, perhaps again
	Learned   func(id uuid.UUID, status string)      // the read model processed a message
	Struck    func(attempt int, f txretrytest.Fault) // a fault of Config.Faults has happened
}

// Parts is the whole shop in one process.
type Parts struct {
	Shop    *Shop
	Keys    *Keys
	Limiter *Limiter
	Outbox  *outboxtest.Store
	Holds   *expirytest.Store
	Inbox   *inboxpgx.Store
	Demo    *Demo

	// The Run of each of these must be called, except for the broker.
	Relay    *outbox.Relay
	Consumer *inboxtest.Consumer
	Sweeper  *expiry.Sweeper
	Broker   *inboxtest.Broker // between relay and consumer

	cfg Config
}

// Open makes the parts.
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

// NewRelay returns another relay, as in another process.
func (p *Parts) NewRelay() (*outbox.Relay, error) {
	return outbox.NewRelay(source{p.Outbox, p.cfg.Wire}, publisher{p.Broker, p.cfg},
		outbox.RelayConfig{MaxCrashes: p.cfg.MaxCrashes, Logger: p.cfg.Logger, Rand: p.cfg.Rand})
}

// NewConsumer returns another consumer, as in another process. fault decides the outcome of its steps.
func (p *Parts) NewConsumer(fault func(inboxtest.Step, *inbox.Message) inboxtest.Outcome) (*inboxtest.Consumer, error) {
	return inboxtest.NewConsumer(p.Broker, inboxtest.Queue{Name: messages.Queue, Fault: fault}, &processor{p.Inbox, p.Demo, p.cfg.Flow},
		inbox.ConsumerConfig{MaxCrashes: p.cfg.MaxCrashes, Logger: p.cfg.Logger, Rand: p.cfg.Rand})
}

// NewSweeper returns another sweeper, as in another process.
func (p *Parts) NewSweeper() (*expiry.Sweeper, error) {
	return expiry.NewSweeper(p.Holds, expiry.SweeperConfig{Schedule: p.cfg.Schedule, Logger: p.cfg.Logger, Rand: p.cfg.Rand})
}

// Shop is the shop in memory. It implements httpapi.Backend.
type Shop struct {
	*Store
	once   *idempotencypgx.Store
	outbox Outbox
	holds  *expirytest.Store
}

// Once implements httpapi.Backend. Here all transactions wait for each other, whatever their event.
func (s *Shop) Once(ctx context.Context, _ string,
	fn func(ctx context.Context, w booking.Work) (idempotency.Response, error),
) (idempotency.Response, error) {
	return s.once.DoWith(ctx, txretry.Options{Name: "shop"}, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		txretry.AfterCommit(tx, func() { s.flow.Note(flow.Transaction, "committed") })
		return fn(ctx, s.work(tx))
	})
}

func (s *Shop) work(tx pgx.Tx) *work {
	return &work{Store: s.Store, tx: tx, outbox: s.outbox, holds: s.holds, now: clock()}
}

// slowness is how long a slow consumer takes for a message.
const slowness = 2 * time.Second

// Demo injects faults into the shop and shows their effects. It is safe for concurrent use.
type Demo struct {
	// Postgres, Redis and RabbitMQ are the servers that the fakes replace.
	Postgres, Redis, RabbitMQ *Server

	slow     atomic.Bool
	inHand   atomic.Int64 // messages that are being processed
	broker   *inboxtest.Broker
	outbox   *outboxtest.Store
	consumer *inboxtest.Consumer
}

// Servers returns all servers.
func (d *Demo) Servers() []*Server { return []*Server{d.Postgres, d.Redis, d.RabbitMQ} }

// SlowDown makes the consumer take two seconds for a message, or ends that. It does not fail.
func (d *Demo) SlowDown(_ context.Context, on bool) error {
	d.slow.Store(on)
	return nil
}

// Slow reports whether the consumer is slow. It does not fail.
func (d *Demo) Slow(context.Context) (bool, error) { return d.slow.Load(), nil }

// maxDead bounds the dead letters, which are kept in memory. Above it no more poison is sent.
const maxDead = 1000

// Poison sends the consumer a message that no attempt can process.
func (d *Demo) Poison(ctx context.Context) error {
	if err := d.RabbitMQ.Ready(ctx); err != nil {
		return err
	}
	backlog, err := d.Backlog(ctx)
	if err != nil {
		return err
	}
	if n := *backlog.Queue + *backlog.Dead; n >= maxDead {
		return fmt.Errorf("memory: %d messages wait or are dead, which is enough", n)
	}
	m := messages.Poison()
	return d.broker.Send(ctx, &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: m.Name, Body: m.Body})
}

// Backlog counts the messages in the outbox and the queue, even if their servers are switched off. Without an error all
// counts are known.
func (d *Demo) Backlog(ctx context.Context) (flow.Backlog, error) {
	depth, err := d.outbox.Depth(ctx)
	if err != nil {
		return flow.Backlog{}, err
	}
	queue, err := d.consumer.Stats(ctx)
	if err != nil {
		return flow.Backlog{}, err
	}
	dead := depth.Dead
	for _, n := range queue.Dead {
		dead += n
	}
	inQueue := queue.Waiting + queue.Retrying + queue.PutOff + int(d.inHand.Load())
	return flow.Backlog{Outbox: new(depth.Ready + depth.Parked), Queue: &inQueue, Dead: &dead}, nil
}

// processor is the consumer's processor, observed and slowed down.
type processor struct {
	*inboxpgx.Store
	demo *Demo
	flow *flow.Tracker
}

// Process implements inbox.Processor. It waits outside of the transaction, like a slow network.
func (p *processor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	p.demo.inHand.Add(int64(len(msgs)))
	defer p.demo.inHand.Add(-int64(len(msgs)))
	if p.demo.slow.Load() {
		select {
		case <-ctx.Done(): // the store requeues the messages
		case <-time.After(slowness):
		}
	}
	results := p.Store.Process(ctx, msgs)
	for i, err := range results {
		flow.NoteAttempt(p.flow, msgs[i].Name, msgs[i].Attempt, err)
	}
	return results
}

// Rows are the rows of all tables.
type Rows struct {
	Events       []booking.EventMap // with the seats as they are stored
	Reservations []booking.Reservation
	Heard        map[string]booking.Status // the read model, by reservation
}

// Dump returns all rows, in no order.
func (s *Store) Dump(ctx context.Context) (rows Rows, err error) {
	err = s.read(ctx, func() error {
		rows = Rows{Heard: make(map[string]booking.Status, len(s.heard))}
		for _, e := range s.events {
			rows.Events = append(rows.Events, booking.EventMap{Event: e.Event, Map: slices.Clone(e.seats)})
		}
		for _, r := range s.reservations {
			rows.Reservations = append(rows.Reservations, r)
		}
		for id, h := range s.heard {
			rows.Heard[id] = h.status
		}
		return nil
	})
	return rows, err
}

// observed reports the stored messages.
type observed struct {
	Outbox
	wrote func(m outbox.Message, at time.Time)
}

// Write implements Outbox.
func (o observed) Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
	if o.wrote == nil {
		return o.Outbox.Write(ctx, tx, msgs...)
	}
	at := clock()
	for i := range msgs {
		if msgs[i].ID == uuid.Nil {
			msgs[i].ID = uuid.Must(uuid.NewV7())
		}
		if err := atCommit(tx, func() { o.wrote(msgs[i], at) }); err != nil {
			return err
		}
	}
	return o.Outbox.Write(ctx, tx, msgs...)
}

// atCommit calls fn when the transaction is durable.
func atCommit(tx pgx.Tx, fn func()) error {
	return txretrytest.EffectAtCommit(tx, func() error { return nil }, nil, fn)
}
