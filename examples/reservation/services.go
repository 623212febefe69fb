package main

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/txretry"
)

// parts is everything that the shop consists of on real servers. Each role runs some of it.
type parts struct {
	servers    *servers
	transactor *txretry.Manager // of requests
	gate       *idempotencyredis.Store
	once       *idempotencypgx.Store
	limiter    *ratelimitredis.Limiter
	messages   *outboxpgx.Store
	outbox     postgres.Outbox // where changes are announced: messages, if they are not left out
	flow       *flow.Shared    // nil: there is no page
	handled    *handled
	broker     broker
	relay      *outbox.Relay
	inbox      *inboxpgx.Store
	holds      *expirypgx.Store
	sweeper    *expiry.Sweeper
	log        *operator.PostgresLog // of what operators do
}

// newParts puts the parts together. Nothing is asked of a server yet. Each part has the logger and the
// meters that are set for the whole process.
func newParts(cfg config, s *servers) *parts {
	// Transactions are idle between two statements for milliseconds only. A process that has
	// vanished in the middle of one keeps its locks for this long.
	transactions := txretry.Config{IdleTimeout: 5 * time.Second}
	p := &parts{servers: s, transactor: must(txretry.New(s.shop, transactions))}
	// Workers seldom wait for a lock, and what fails is tried again. So they give up a COMMIT without an
	// answer after 4 s, where a request waits for 9.
	ofWorkers := transactions
	ofWorkers.LockTimeout, ofWorkers.CommitTimeout = 3*time.Second, 4*time.Second
	workers := must(txretry.New(s.workers, ofWorkers))
	if cfg.page {
		p.flow = flow.NewShared(s.redis)
		s.farewell = p.flow.Tell
	}
	p.handled = &handled{flow: p.flow}
	if cfg.trials {
		p.handled.slow = trials{redis: s.redis}.delay
	}

	p.gate = must(idempotencyredis.New(s.redis, idempotencyredis.Config{}))
	p.once = must(idempotencypgx.New(p.transactor, idempotencypgx.Config{Gate: p.gate}))
	p.limiter = must(ratelimitredis.New(s.redis, ratelimitredis.Config{
		// Long enough for a crowd to take turns on the connections: a request that comes to nothing
		// for want of a quick answer would cost a buyer the seat.
		Timeout: 5 * time.Second,
	}))

	p.messages = must(outboxpgx.New(s.workers, outboxpgx.Config{}))
	p.outbox = p.messages
	if cfg.without.has(layerMessages) {
		p.outbox = silent{}
	}
	p.inbox = must(postgres.NewInbox(workers, p.flow))
	p.broker = newBroker(cfg, s, countedInbox{p.inbox, p.handled}, p.handled)
	p.relay = must(outbox.NewRelay(p.messages, p.broker.publisher, outbox.RelayConfig{}))

	p.holds = must(expirypgx.New(workers, "reservations", expirypgx.Config{Emit: postgres.Swept(p.outbox)}))
	p.log = must(operator.NewPostgresLog(s.workers))
	p.sweeper = must(expiry.NewSweeper(p.holds, expiry.SweeperConfig{Schedule: cfg.sweep}))
	return p
}

// prepare creates the tables, and waits for Postgres as long as startTimeout. Many processes may do so at once.
func (p *parts) prepare(ctx context.Context, group *service.Group) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return group.Prepare(ctx, "postgres", p.messages.Migrate, p.inbox.Migrate, p.once.Migrate, p.log.Migrate, shopTables{p}.Migrate)
}

// openServices is the back end on real servers, with the parts of the role.
func openServices(ctx context.Context, cfg config) (*backend, error) {
	s, err := newServers(cfg)
	if err != nil {
		return nil, err
	}
	p := newParts(cfg, s)
	group := newGroup(cfg, p.sweeper, p.broker.consumer, p.relay, p.broker.setup...)
	if err := p.prepare(ctx, group); err != nil {
		s.close()
		return nil, err
	}
	b := &backend{
		shop: postgres.NewShop(s.shop, p.once, p.outbox, p.holds, p.flow), keys: p.once, limiter: p.limiter,
		group: group, ready: group.Ready(s.checks(cfg.role)), operator: p.operator(cfg), handled: p.handled,
		flow: p.flow, close: s.close,
	}
	if cfg.page {
		p.show(cfg, b)
	}
	if cfg.without.has(layerLimits) {
		b.limiter = nil
	}
	if cfg.without.has(layerKeys) {
		b.keys, b.shop = nil, postgres.NewShop(s.shop, keyless{p.transactor}, p.outbox, p.holds, p.flow)
	}
	return b, nil
}
