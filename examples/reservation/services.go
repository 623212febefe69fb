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
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
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

// handled counts the messages that a process has published or processed, and tells the flow of them.
type handled struct {
	atomic.Int64
	flow flow.Flow
	// inHand are being processed.
	inHand atomic.Int64
	// slow says how long a consumer waits before it processes messages. nil: not at all.
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

// wait is outside of the transaction, as that of a slow network would be.
func (h *handled) wait(ctx context.Context) {
	if h.slow == nil {
		return
	}
	select {
	case <-ctx.Done(): // the store gives the messages back
	case <-time.After(h.slow(ctx)):
	}
}

// Each of these embeds a part whole: relays and consumers look for what else it can do.
type (
	countedAMQP struct {
		*outboxamqp.Publisher
		handled *handled
	}
	countedRedis struct {
		*outboxredis.Publisher
		handled *handled
	}
	countedInbox struct {
		*inboxpgx.Store
		handled *handled
	}
)

// Publish counts what is confirmed.
func (p countedAMQP) Publish(ctx context.Context, m driver.Message, done func(error)) {
	p.Publisher.Publish(ctx, m, p.handled.published(m.Name, done))
}

// Publish counts what is confirmed.
func (p countedRedis) Publish(ctx context.Context, m driver.Message, done func(error)) {
	p.Publisher.Publish(ctx, m, p.handled.published(m.Name, done))
}

// Process counts what has gone well.
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
	// backlogEvery is how often the servers are asked what waits, while somebody looks at the page.
	backlogEvery   = 500 * time.Millisecond
	backlogTimeout = 5 * time.Second
	// looking is for how long after a look somebody is thought to be there.
	looking = 3 * time.Second
	// freshFor is how long an answer is told: until the next one has had all the time that it may take.
	freshFor = backlogTimeout + 2*backlogEvery
)

// backlog knows what waits on real servers. All viewers share one look, since each opens a connection to the broker.
// Of a server that does not answer nothing is known soon.
type backlog struct {
	outbox func(context.Context) (driver.Depth, error)
	queue  func(context.Context) (inbox.Stats, error)
	inHand func() int64 // the broker has handed it out, and it is not processed yet

	mu     sync.Mutex
	asked  time.Time
	depth  answer[driver.Depth]
	behind answer[inbox.Stats]
}

// answer is what a server has told, and when.
type answer[T any] struct {
	at   time.Time
	told T
}

func (a answer[T]) fresh() bool { return time.Since(a.at) < freshFor }

// Look returns what was seen last, and nothing of a server that has not answered, or not for freshFor. It does not fail.
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

// Run looks until ctx ends.
func (b *backlog) Run(ctx context.Context) error {
	var looks sync.WaitGroup
	looks.Go(func() { b.repeat(ctx, b.lookAtOutbox) })
	looks.Go(func() { b.repeat(ctx, b.lookAtQueue) })
	looks.Wait()
	return nil
}

// Ready returns nil: no work waits for a view.
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
