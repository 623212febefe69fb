package main

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/history"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/txretry"
)

// parts has all parts of the shop on real servers. Each role runs some of them.
type parts struct {
	servers    *servers
	transactor *txretry.Manager // of requests
	gate       *idempotencyredis.Store
	once       *idempotencypgx.Store
	limiter    *ratelimitredis.Limiter
	messages   *outboxpgx.Store
	flow       *flow.Shared // nil: there is no page
	handled    *handled
	broker     broker
	relay      *outbox.Relay
	inbox      *inboxpgx.Store
	holds      *expirypgx.Store
	sweeper    *expiry.Sweeper
	log        *operator.PostgresLog // of the actions of operators
	history    *operator.PostgresHistory
}

// newParts makes the parts. It does not connect to a server. Each part uses the logger and the
// meters of the process.
func newParts(cfg config, s *servers) *parts {
	// Transactions are idle between two statements for milliseconds only. The locks of a process that has
	// vanished in a transaction are kept for this long.
	transactions := txretry.Config{IdleTimeout: 5 * time.Second}
	p := &parts{servers: s, transactor: must(txretry.New(s.shop, transactions))}
	// Workers seldom wait for a lock, and failed work is tried again. So they give up a COMMIT without an
	// answer after 4 s. A request waits for 9 s.
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
		// Long enough for many requests to take turns on the connections: a request that fails
		// because of a slow answer would cost a buyer the seat.
		Timeout: 5 * time.Second,
	}))

	p.messages = must(outboxpgx.New(s.workers, outboxpgx.Config{}))
	p.inbox = must(postgres.NewInbox(workers, p.flow))
	p.broker = newBroker(cfg, s, countedInbox{p.inbox, p.handled}, p.handled)
	p.relay = must(outbox.NewRelay(p.messages, p.broker.publisher, outbox.RelayConfig{}))

	p.holds = must(expirypgx.New(workers, "reservations", expirypgx.Config{Emit: postgres.Swept(p.messages)}))
	p.log = must(operator.NewPostgresLog(s.workers))
	p.history = must(operator.NewPostgresHistory(s.workers))
	p.sweeper = must(expiry.NewSweeper(p.holds, expiry.SweeperConfig{Schedule: cfg.sweep}))
	return p
}

// prepare creates the tables. It waits for Postgres at most startTimeout. Many processes may call it at once.
func (p *parts) prepare(ctx context.Context, group *service.Group) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return group.Prepare(ctx, "postgres", p.messages.Migrate, p.inbox.Migrate, p.once.Migrate, p.log.Migrate, p.history.Migrate, shopTables{p}.Migrate)
}

// openServices returns the back end on real servers, with the parts of the role.
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
	operated := p.operator(cfg)
	group.Add("history", must(history.New(operated)))
	b := &backend{
		shop: postgres.NewShop(s.shop, p.once, p.messages, p.holds, p.flow), keys: p.once, limiter: p.limiter,
		group: group, ready: group.Ready(s.checks(cfg.role)), operator: operated, handled: p.handled,
		flow: p.flow, close: s.close,
	}
	if cfg.page {
		p.show(cfg, b)
	}
	return b, nil
}

// handled counts the messages that a process has published or processed, and notes them in flow.
type handled struct {
	atomic.Int64
	flow flow.Flow
	// inHand is the number of messages that are being processed.
	inHand atomic.Int64
	// slow returns how long a consumer waits before it processes messages. nil: not at all.
	slow func(ctx context.Context) time.Duration
}

func (h *handled) published(name string, done func(error)) func(error) {
	return func(err error) {
		if err == nil {
			h.Add(1)
			h.flow.Note(flow.Published, name)
		}
		done(err)
	}
}

// wait waits outside of the transaction, like a slow network.
func (h *handled) wait(ctx context.Context) {
	if h.slow == nil {
		return
	}
	select {
	case <-ctx.Done(): // the store requeues the messages
	case <-time.After(h.slow(ctx)):
	}
}

// Each of these embeds a whole part, because relays and consumers look for its optional methods.
type (
	countedAMQP struct {
		*outboxamqp.Publisher
		handled *handled
	}
	countedRedis struct {
		*outboxredis.Publisher
		handled *handled
	}
	countedNATS struct {
		*outboxnats.Publisher
		handled *handled
	}
	countedInbox struct {
		*inboxpgx.Store
		handled *handled
	}
)

// Publish counts confirmed messages.
func (p countedAMQP) Publish(ctx context.Context, m driver.Message, done func(error)) {
	p.Publisher.Publish(ctx, m, p.handled.published(m.Name, done))
}

// Publish counts confirmed messages.
func (p countedRedis) Publish(ctx context.Context, m driver.Message, done func(error)) {
	p.Publisher.Publish(ctx, m, p.handled.published(m.Name, done))
}

// Publish counts confirmed messages.
func (p countedNATS) Publish(ctx context.Context, m driver.Message, done func(error)) {
	p.Publisher.Publish(ctx, m, p.handled.published(m.Name, done))
}

// Process counts processed messages.
func (s countedInbox) Process(ctx context.Context, msgs []*inbox.Message) []error {
	s.handled.inHand.Add(int64(len(msgs)))
	defer s.handled.inHand.Add(-int64(len(msgs)))
	s.handled.wait(ctx)
	results := s.Store.Process(ctx, msgs)
	for i, err := range results {
		if err == nil {
			s.handled.Add(1)
		}
		flow.NoteAttempt(s.handled.flow, msgs[i].Name, msgs[i].Attempt, err)
	}
	return results
}

const (
	// backlogEvery is how often the servers are asked while somebody views the page.
	backlogEvery   = 500 * time.Millisecond
	backlogTimeout = 5 * time.Second
	// looking is how long after a look somebody is assumed to view the page.
	looking = 3 * time.Second
	// freshFor is how long an answer is used: until the next answer has had its whole timeout.
	freshFor = backlogTimeout + 2*backlogEvery
)

// backlog counts the waiting messages on real servers. All viewers share one look, because each opens a connection to the
// broker. If a server does not answer, its counts soon become unknown.
type backlog struct {
	outbox func(context.Context) (driver.Depth, error)
	queue  func(context.Context) (inbox.Stats, error)
	inHand func() int64 // delivered by the broker, and not processed yet

	mu     sync.Mutex
	asked  time.Time
	depth  answer[driver.Depth]
	behind answer[inbox.Stats]
}

// answer is the last answer of a server, with its time.
type answer[T any] struct {
	at   time.Time
	told T
}

func (a answer[T]) fresh() bool { return time.Since(a.at) < freshFor }

// Look returns the last counts. Counts of a server without an answer within freshFor are nil. It does not fail.
func (b *backlog) Look(context.Context) (flow.Backlog, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = time.Now()
	var seen flow.Backlog
	if b.depth.fresh() {
		seen.Outbox = new(inOutbox(b.depth.told))
	}
	if b.behind.fresh() {
		seen.Queue = new(inQueue(b.behind.told) + int(b.inHand()))
	}
	if b.depth.fresh() && b.behind.fresh() {
		seen.Dead = new(dead(b.depth.told, b.behind.told))
	}
	return seen, nil
}

func inOutbox(depth driver.Depth) int { return depth.Ready + depth.Parked }

func inQueue(queue inbox.Stats) int { return queue.Waiting + queue.Retrying + queue.PutOff }

func dead(depth driver.Depth, queue inbox.Stats) int {
	n := depth.Dead
	for _, of := range queue.Dead {
		n += of
	}
	return n
}

// Run asks the servers until ctx ends.
func (b *backlog) Run(ctx context.Context) error {
	var looks sync.WaitGroup
	looks.Go(func() { b.repeat(ctx, b.lookAtOutbox) })
	looks.Go(func() { b.repeat(ctx, b.lookAtQueue) })
	looks.Wait()
	return nil
}

// Ready returns nil: no work depends on this view.
func (b *backlog) Ready(context.Context) error { return nil }

func (b *backlog) repeat(ctx context.Context, look func(context.Context)) {
	tick := time.NewTicker(backlogEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if !b.wanted() {
			continue
		}
		attempt, cancel := context.WithTimeout(ctx, backlogTimeout)
		look(attempt)
		cancel()
	}
}

func (b *backlog) wanted() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return time.Since(b.asked) < looking
}

func (b *backlog) lookAtOutbox(ctx context.Context) {
	depth, err := b.outbox(ctx)
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.depth = answer[driver.Depth]{time.Now(), depth}
}

func (b *backlog) lookAtQueue(ctx context.Context) {
	behind, err := b.queue(ctx)
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.behind = answer[inbox.Stats]{time.Now(), behind}
}
