// Package group serves the partitions of an ordered queue: one consumer for each, side by side on one processor.
//
// All processes ask for all partitions, and the broker serves each partition to one of them: RabbitMQ by a
// single active consumer, Redis by a lease. If a process ends or dies, the broker serves its partitions to
// others, unsettled messages first. The group evens out the load:
//
//	asks ──────────► served ──────────► drains ──────────► asks, behind the others
//	      by the broker     above the share     nothing is in flight
//
// Members counts the processes. The share of a process is the number of partitions divided by the number of
// processes, rounded up. A process that is served more ends the Run of some consumers and starts them again.
// A wrong count costs at most a needless drain, and never the order: only the broker decides which process it
// serves.
package group

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// leveling is about how often a process compares its partitions with its share.
	leveling = 10 * time.Second
	// settling is how long a partition that has changed hands may be without a session before Ready reports it.
	settling = 5 * time.Second
)

// Source is the source of one partition.
type Source interface {
	driver.Source
	// Served reports whether the broker serves the partition to this process, as far as the source knows.
	Served() bool
}

// Partition is a queue or stream with its source.
type Partition struct {
	Name   string
	Source Source
}

// Members counts the processes that share the partitions.
type Members interface {
	// Run counts this process as a member, and does the work needed once for all partitions, until ctx ends.
	Run(ctx context.Context)
	// Count returns the number of processes; 0 means that it is not known.
	Count(ctx context.Context) int
}

// Config configures a Group.
type Config struct {
	// Consumer is the config of the whole queue. Concurrency, Batch and Prefetch apply to each partition; the
	// limits that end Run apply to all together.
	Consumer engine.Config
	// Whole counts the messages and dead letters of all partitions. It is never opened.
	Whole driver.Source
	// Partitions are at least two. Members counts the processes that share them.
	Partitions []Partition
	Members    Members
	// Leveling is about how often shares are compared. Default: 10 s.
	Leveling time.Duration
	// Aside is how long a partition that was given up is not asked for. Default: 0.
	Aside time.Duration
}

// CheckPartitions returns the violated rules of a number of partitions. Their texts begin with the name of its field.
func CheckPartitions(field string, n int, cfg inbox.ConsumerConfig) (problems []error) {
	if err := partition.Check(n); err != nil {
		problems = append(problems, fmt.Errorf("%s: %w", field, err))
	}
	if n > 1 && !cfg.Ordered {
		problems = append(problems, errors.New(field+" needs ConsumerConfig.Ordered: without it several processes share one stream"))
	}
	if n > 1 && cfg.Key != nil {
		problems = append(problems, errors.New(field+" excludes ConsumerConfig.Key: the sender's key selects the partition"))
	}
	if n > 1 && cfg.ParkKeys {
		problems = append(problems, errors.New(field+" excludes ConsumerConfig.ParkKeys: the parked keys of all partitions are kept together"))
	}
	return problems
}

// Group is the set of consumers of all partitions. Its methods may be called from any goroutine.
type Group struct {
	cfg       Config
	consumer  inbox.ConsumerConfig // with its defaults
	processor *shared
	whole     *engine.Consumer // never runs; it watches and counts
	parts     []*part
	running   atomic.Bool
}

// New returns the consumers of all partitions. The error names every violation in the config.
func New(p inbox.Processor, cfg Config) (*Group, error) {
	if cfg.Leveling == 0 {
		cfg.Leveling = leveling
	}
	whole, err := engine.New(cfg.Whole, p, cfg.Consumer)
	if err != nil {
		return nil, err
	}
	g := &Group{
		cfg: cfg, consumer: driver.ConsumerDefaults(cfg.Consumer.ConsumerConfig, cfg.Consumer.Queue),
		processor: newShared(p), whole: whole,
	}
	each := cfg.Consumer
	each.ConsumerConfig, each.Solo = g.consumer, &engine.Solo{}
	each.TimeLimit, each.MessageLimit = 0, 0
	for _, one := range cfg.Partitions {
		each.Queue = one.Name
		// The engine sees no optional interfaces of the source: dead letters are counted for the whole queue.
		c, err := engine.New(struct{ driver.Source }{one.Source}, g.processor, each)
		if err != nil {
			return nil, err
		}
		log := g.consumer.Logger.With(slog.String("component", each.Package), slog.String("queue", each.Queue))
		g.parts = append(g.parts, &part{name: one.Name, source: one.Source, consumer: c, log: log, aside: cfg.Aside})
	}
	return g, nil
}

// Run serves the partitions until ctx is cancelled or a limit is reached; see engine.Consumer.Run.
func (g *Group) Run(ctx context.Context) error {
	if err := driver.Unworkable(g.consumer, g.processor.Processor); err != nil {
		return g.errorf("run: %w", err)
	}
	if !g.running.CompareAndSwap(false, true) {
		return g.errorf("Run is running already")
	}
	defer g.running.Store(false)
	run, halt := context.WithCancel(ctx)
	defer halt()
	whole, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	g.processor.begin(g.consumer.MessageLimit, func() { g.limit(run, halt, "MessageLimit") })
	if g.consumer.TimeLimit > 0 {
		defer time.AfterFunc(g.consumer.TimeLimit, func() { g.limit(run, halt, "TimeLimit") }).Stop()
	}
	ended := make(chan struct{})
	var err error
	go func() {
		defer close(ended)
		err = g.serve(run, halt, whole, end)
	}()
	select {
	case <-ended:
		return err
	case <-run.Done():
	}
	timer := time.NewTimer(g.consumer.ShutdownTimeout)
	defer timer.Stop()
	select {
	case <-ended:
		return err
	case <-timer.C: // the consumers have logged it
		return nil
	}
}

// limit ends a run that has reached a limit.
func (g *Group) limit(run context.Context, halt context.CancelFunc, name string) {
	if run.Err() == nil {
		g.consumer.Logger.Info("limit reached, draining", slog.String("component", g.cfg.Consumer.Package), slog.String("limit", name))
	}
	halt()
}

// serve runs everything. The members end after the consumers, which depend on them.
func (g *Group) serve(run context.Context, halt context.CancelFunc, whole context.Context, end context.CancelFunc) error {
	var consumers, others, members sync.WaitGroup
	members.Go(func() { g.cfg.Members.Run(whole) })
	others.Go(func() { g.whole.Watch(run) })
	others.Go(func() { g.processor.watch(run) })
	others.Go(func() { g.level(run) })
	errs := make([]error, len(g.parts))
	for i, p := range g.parts {
		consumers.Go(func() {
			defer halt() // a consumer that ends by itself has reached a limit
			errs[i] = p.serve(run)
		})
	}
	consumers.Wait()
	others.Wait()
	end()
	members.Wait()
	return errors.Join(errs...)
}

// level gives up partitions above this process's share, until ctx ends.
func (g *Group) level(ctx context.Context) {
	for runloop.Sleep(ctx, g.cfg.Leveling/2+rand.N(g.cfg.Leveling)) == nil {
		for _, p := range g.excess(ctx) {
			p.giveUp()
		}
	}
}

// excess returns the partitions above the share, any of those that this process serves.
func (g *Group) excess(ctx context.Context) []*part {
	var served []*part
	for _, p := range g.parts {
		if p.served() {
			served = append(served, p)
		}
	}
	if len(served) < 2 {
		return nil
	}
	processes := max(g.cfg.Members.Count(ctx), 1)
	share := (len(g.parts) + processes - 1) / processes
	rand.Shuffle(len(served), func(i, j int) { served[i], served[j] = served[j], served[i] })
	return served[min(share, len(served)):]
}

// Ready returns nil if the consumers of all partitions are ready, or a partition is just changing hands. The
// error gives the reason why one is not ready.
func (g *Group) Ready(ctx context.Context) error {
	if !g.running.Load() {
		return g.errorf("%w", runloop.NotRunning("not running"))
	}
	for _, p := range g.parts {
		if err := p.consumer.Ready(ctx); err != nil && !p.changesHands() {
			return fmt.Errorf("%w (partition %s)", err, p.name)
		}
	}
	return nil
}

// Counts returns the numbers of settled deliveries of all partitions in this process.
func (g *Group) Counts() driver.Counts {
	var all driver.Counts
	for _, p := range g.parts {
		c := p.consumer.Counts()
		all.Done, all.Failed, all.Retried = all.Done+c.Done, all.Failed+c.Failed, all.Retried+c.Retried
	}
	return all
}

// Running returns the messages of all partitions in work in this process, the oldest first.
func (g *Group) Running() []driver.Running {
	var all []driver.Running
	for _, p := range g.parts {
		all = append(all, p.consumer.Running()...)
	}
	slices.SortStableFunc(all, func(a, b driver.Running) int { return a.Since.Compare(b.Since) })
	return all
}

// Stats counts the messages of all partitions; see engine.Consumer.Stats.
func (g *Group) Stats(ctx context.Context) (inbox.Stats, error) { return g.whole.Stats(ctx) }

// errorf returns an error with the prefix of the transport.
func (g *Group) errorf(format string, args ...any) error {
	return fmt.Errorf(g.cfg.Consumer.Package+": "+format, args...)
}

// part is one partition.
type part struct {
	name     string
	source   Source
	consumer *engine.Consumer
	log      *slog.Logger
	aside    time.Duration

	mu      sync.Mutex
	end     context.CancelFunc // of the turn; nil: none runs
	leaving bool               // the turn is given up
	left    time.Time          // when a turn was given up last
}

// serve runs the consumer turn by turn until ctx ends or the consumer has reached a limit.
func (p *part) serve(ctx context.Context) error {
	for {
		turn, cancel := context.WithCancel(ctx)
		p.mu.Lock()
		p.end = cancel
		p.mu.Unlock()
		err := p.consumer.Run(turn)
		if left := p.ended(); !left || err != nil || ctx.Err() != nil {
			return err
		}
		p.log.InfoContext(ctx, "partition given up to another process")
		if runloop.Sleep(ctx, p.aside) != nil {
			return nil
		}
	}
}

// ended records the end of a turn, and reports whether it was given up.
func (p *part) ended() (left bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.end()
	p.end = nil
	if left = p.leaving; left {
		p.leaving, p.left = false, time.Now()
	}
	return left
}

// giveUp ends the turn, and with it the consumer's Run once nothing is in flight.
func (p *part) giveUp() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.end != nil {
		p.leaving = true
		p.end()
	}
}

// served reports whether the broker serves the partition to this process and the turn is not given up.
func (p *part) served() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.end != nil && !p.leaving && p.source.Served()
}

// changesHands reports whether the partition is being given up, or was recently.
func (p *part) changesHands() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leaving || !p.left.IsZero() && time.Since(p.left) < p.aside+settling
}
