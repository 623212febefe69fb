package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// Config configures a consumer. A transport derives it from its own Config.
type Config struct {
	inbox.ConsumerConfig

	// Queue is the name of the source's queue, for logs, metrics and the default of Name. Required.
	Queue string
	// Package is the name of the transport's package, such as inboxamqp. It precedes the texts of errors, is
	// the component in logs, and names the metrics and the instrumentation scope. Required.
	Package string
	// Timeout bounds every call of the processor's ledger. Default: 5 s.
	Timeout time.Duration
	// MaxBodyBytes is the largest body passed to the processor. Default: 16 MiB.
	MaxBodyBytes int
	// Solo is shared by several consumers in one process. nil means that nothing is shared.
	Solo *Solo
}

// Consumer passes the messages of one source to a Processor and settles them by the results. Its methods may
// be called from any goroutine.
type Consumer struct {
	cfg       *settings
	source    driver.Source
	processor inbox.Processor
	meters    *instruments
	status    atomic.Pointer[status] // of the run; nil: none
	current   atomic.Pointer[run]    // nil: none
	running   atomic.Bool
}

// New returns a consumer of a source. It uses the ledger of a processor with deduplication, and Run runs the
// processor's background work. The error names every violation in cfg. New sends nothing to a server.
func New(source driver.Source, processor inbox.Processor, cfg Config) (*Consumer, error) {
	s := newSettings(source, processor, cfg)
	err := s.validate()
	if processor == nil {
		err = errors.Join(s.errorf("processor is nil"), err)
	}
	if source == nil {
		err = errors.Join(s.errorf("source is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	meters, err := newInstruments(s, source)
	if err != nil {
		return nil, s.errorf("%w", err)
	}
	return &Consumer{cfg: s, source: source, processor: processor, meters: meters}, nil
}

// Run consumes until ctx is cancelled or a limit of the Config is reached. Then it receives no more messages, requeues
// those that have not started, lets the others finish, settles them and returns nil, after ShutdownTimeout at the
// latest. The broker may be down when it starts, or go down later: Run retries. Calling it while it runs is an error,
// and so are settings that cannot work with the processor; see driver.Unworkable.
func (c *Consumer) Run(ctx context.Context) error {
	if err := driver.Unworkable(c.cfg.ConsumerConfig, c.processor); err != nil {
		return c.cfg.errorf("run: %w", err)
	}
	if !c.running.CompareAndSwap(false, true) {
		return c.cfg.errorf("Run is running already")
	}
	defer c.running.Store(false)
	defer c.meters.observe()()
	r := newRun(ctx, c)
	c.status.Store(r.loop.status)
	defer c.status.Store(nil)
	c.current.Store(r)
	defer c.current.Store(nil)
	r.serve()
	return nil
}

// Watch does the part of Run that several consumers on one processor need only once: it counts dead letters for the
// gauge, and runs the background work of the processor. It blocks until ctx ends.
func (c *Consumer) Watch(ctx context.Context) {
	var counting sync.WaitGroup
	counting.Go(func() { c.meters.depths.run(ctx) })
	if c.cfg.background != nil {
		c.cfg.background.Background(ctx)
	}
	counting.Wait()
}

// Ready returns nil if messages are being received, failed ones can be moved, and handlers return in time.
// Otherwise the error gives the reason: why there is no session, which destination has rejected a failed
// message in about the last minute, or how many handlers ignore cancellation.
func (c *Consumer) Ready(ctx context.Context) error {
	shown := c.status.Load()
	if shown == nil {
		return c.cfg.errorf("%w", runloop.NotRunning("not running"))
	}
	return shown.ready(ctx, c.source.Ready)
}

// Counts returns the numbers of settled deliveries in this process. It makes no server call.
func (c *Consumer) Counts() driver.Counts {
	return driver.Counts{Done: c.meters.done.Load(), Failed: c.meters.failed.Load(), Retried: c.meters.repeated.Load()}
}

// Running returns the messages in work in this process, the oldest first. It makes no server call.
func (c *Consumer) Running() []driver.Running {
	r := c.current.Load()
	if r == nil {
		return nil
	}
	answer := make(chan []driver.Running, 1)
	r.workers.post(event{kind: inquired, answer: answer})
	select {
	case all := <-answer:
		return all
	case <-r.over:
		return nil
	}
}

// Stats counts the consumer's messages on the server, even if Run is not running. It opens connections of its
// own, and reads no message. Numbers that a source does not count are 0.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) {
	var stats inbox.Stats
	if source, ok := c.source.(driver.Measured); ok {
		backlog, err := source.Backlog(ctx)
		if err != nil {
			return stats, fmt.Errorf("%s: stats: %w", c.cfg.Package, err)
		}
		stats.Waiting, stats.Retrying, stats.PutOff = backlog.Waiting, backlog.Retrying, backlog.PutOff
	}
	dead, held, err := c.meters.depths.byClass(ctx)
	if err != nil {
		return stats, fmt.Errorf("%s: stats: %w", c.cfg.Package, err)
	}
	stats.Dead, stats.Held = dead, held
	return stats, nil
}

// run is one call of Run: the loop and its goroutines.
type run struct {
	cfg      *settings
	source   driver.Source
	watch    func(context.Context)
	loop     *loop
	workers  *workers
	acker    *acker
	mover    *mover
	receiver *receiver
	tracker  *tracker

	stop     context.Context // done: receive no more messages
	halt     context.CancelFunc
	work     context.Context // of the handlers
	abort    context.CancelCauseFunc
	finished context.Context // done: all waits end
	end      context.CancelFunc
	over     chan struct{} // closed: the loop reads no more events

	settling sync.WaitGroup // acker and movers
	others   sync.WaitGroup
}

// eventRoom is how many events may wait for the loop.
const eventRoom = 64

func newRun(ctx context.Context, c *Consumer) *run {
	cfg := c.cfg
	r := &run{cfg: cfg, source: c.source, watch: c.Watch, over: make(chan struct{})}
	r.stop, r.halt = context.WithCancel(ctx)
	r.work, r.abort = context.WithCancelCause(context.WithoutCancel(ctx))
	r.finished, r.end = context.WithCancel(context.WithoutCancel(ctx))

	events, jobs := make(chan event, eventRoom), make(chan *job, cfg.Concurrency)
	settling, moving, commands := make(chan *settlement), make(chan *removal), make(chan command, 1)
	post := func(ev event) {
		select { // the usual case first, because it costs less
		case events <- ev:
			return
		default:
		}
		select {
		case events <- ev:
		case <-r.over:
		}
	}
	r.tracker = &tracker{cfg: cfg, work: r.finished}
	r.workers = &workers{cfg: cfg, processor: c.processor, meters: c.meters, tracker: r.tracker, ctx: r.work, jobs: jobs, post: post}
	r.acker = &acker{meters: c.meters, ctx: r.finished, work: settling, post: post}
	r.mover = &mover{cfg: cfg, source: c.source, meters: c.meters, tracker: r.tracker, ctx: r.finished, work: moving, post: post}
	r.receiver = &receiver{cfg: cfg, source: c.source, meters: c.meters, commands: commands, post: post, ctx: r.finished}
	r.loop = &loop{
		cfg: cfg, meters: c.meters, status: &status{cfg: cfg},
		inflight: newInflight(cfg), outage: newOutage(cfg),
		acks:     &acks{cfg: cfg, next: &settlement{}, spare: &settlement{}},
		outbound: &outgoing{cfg: cfg},
		link:     &link{ctx: r.finished, commands: commands},
		drain:    &drain{halt: r.halt, abort: r.abort, abandon: r.abandon},
		overruns: &overruns{cfg: cfg, meters: c.meters},
		alarm:    newAlarm(),
		events:   events, jobs: jobs, settling: settling, moving: moving,
	}
	return r
}

// serve runs everything. It returns at most ShutdownTimeout after the stop, whatever hangs.
func (r *run) serve() {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.start()
		r.loop.run()
		r.finish()
	}()
	select {
	case <-ended:
		return
	case <-r.stop.Done():
	}
	timer := time.NewTimer(r.cfg.ShutdownTimeout)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		r.end()
		r.abort(inbox.ErrDraining)
		r.cfg.Logger.Error("shutdown timed out; abandoning the consumer")
	}
}

func (r *run) start() {
	r.workers.start()
	r.settling.Go(r.acker.run)
	for range removals(r.cfg) {
		r.settling.Go(r.mover.run)
	}
	r.others.Go(r.receiver.run)
	r.others.Go(func() { r.source.Run(r.finished) })
	r.others.Go(func() { r.watch(r.stop) })
	r.others.Go(func() {
		watchLimits(r.stop, r.cfg, r.workers.post)
		r.workers.post(event{kind: mustEnd})
	})
	if r.cfg.pausable != nil {
		r.others.Go(func() {
			r.cfg.pausable.WatchPause(r.stop, func(p driver.Pause) { r.workers.post(event{kind: switched, by: p}) })
		})
	}
}

// abandon stops waiting for running handlers.
func (r *run) abandon() {
	r.cfg.Logger.Error("handlers ignored cancellation; abandoning them")
	r.settling.Go(r.tracker.abandoned)
}

// finish waits for the goroutines started by start.
func (r *run) finish() {
	r.halt()
	close(r.over)
	close(r.workers.jobs)
	close(r.acker.work)
	close(r.mover.work)
	if !r.loop.drain.abandoned {
		r.workers.running.Wait()
	}
	r.settling.Wait()
	r.end()
	r.abort(nil)
	r.others.Wait()
}

// settings are a Config with its defaults, and the abilities of the source and the processor.
type settings struct {
	Config
	traits     driver.Traits
	ledger     driver.Ledger     // of the processor; nil: none
	limiter    driver.Limiter    // of the processor; nil: none
	background driver.Background // of the processor; nil: none
	pausable   driver.Pausable   // nil: the processor cannot be paused
	parker     driver.Parker     // the processor, if failed messages stop their keys; otherwise nil
	classes    map[string]bool   // classes with a dead-letter queue of their own
}

func newSettings(source driver.Source, p inbox.Processor, cfg Config) *settings {
	cfg.ConsumerConfig = driver.ConsumerDefaults(cfg.ConsumerConfig, cfg.Queue)
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	cfg.MaxBodyBytes = cmp.Or(cfg.MaxBodyBytes, driver.MaxBodyBytes)
	cfg.Logger = cfg.Logger.With(slog.String("component", cfg.Package), slog.String("queue", cfg.Queue))
	s := &settings{Config: cfg, classes: map[string]bool{}}
	if source != nil {
		s.traits = source.Traits()
	}
	if d, ok := p.(driver.Deduplicator); ok {
		s.ledger = d.Ledger()
	}
	s.limiter, _ = p.(driver.Limiter)
	s.background, _ = p.(driver.Background)
	s.pausable, _ = p.(driver.Pausable)
	s.parker = driver.ParkerOf(p, cfg.ConsumerConfig)
	if parker, ok := p.(driver.Parker); ok {
		parker.Park(cfg.ConsumerConfig)
	}
	for _, class := range driver.Places(s.traits, cfg.Classes) {
		s.classes[class] = true
	}
	return s
}

// validate returns every violation in one error.
func (s *settings) validate() error {
	var problems []error
	fail := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf(s.Package+": "+format, args...))
	}
	if s.Timeout < 0 {
		fail("Timeout %v is negative", s.Timeout)
	}
	if s.MaxBodyBytes < 0 {
		fail("MaxBodyBytes %d is negative", s.MaxBodyBytes)
	}
	if s.traits.MaxWindow > 0 && s.Prefetch > s.traits.MaxWindow {
		fail("ConsumerConfig.Prefetch %d is more than the transport's %d", s.Prefetch, s.traits.MaxWindow)
	}
	if s.Ordered && !s.traits.Exclusive {
		fail("ConsumerConfig.Ordered needs a source that serves one session at a time")
	}
	if s.ParkKeys && !s.Ordered {
		fail("ConsumerConfig.ParkKeys needs Ordered")
	}
	if s.ParkKeys && s.parker == nil {
		fail("ConsumerConfig.ParkKeys needs a processor that can keep messages")
	}
	return errors.Join(errors.Join(problems...), driver.CheckConsumer(s.ConsumerConfig))
}

// limit returns the time limit of the processor for n messages together.
func (s *settings) limit(n int) time.Duration {
	return driver.CallTimeout(s.ConsumerConfig, s.traits.Hold, n)
}

// tracks reports whether a message's runs are recorded in the ledger. The first delivery is not, so that a
// success costs nothing.
func (s *settings) tracks(m *inbox.Message) bool {
	return s.ledger != nil && (m.Redelivered || m.Attempt > 1 || m.Replays > 0) && m.Validate() == nil
}

// destination returns the name of the destination of failed messages, for logs and Ready.
func (s *settings) destination(o order, class string) string {
	if o.target == toStop {
		return "the store of stopped keys"
	}
	if o.target != driver.ToDead {
		return "the retries of " + s.Queue
	}
	if !s.classes[class] {
		class = driver.ClassDefault
	}
	return "queue " + driver.DeadLetterQueue(s.DeadLetterPrefix, class)
}

// metric returns the name of a metric of the transport.
func (s *settings) metric(name string) string {
	return "holdfast.inbox." + strings.TrimPrefix(s.Package, "inbox") + "." + name
}

// attributes returns attributes of a measurement with the consumer's name and queue. A queue may have several consumers.
func (s *settings) attributes(more ...attribute.KeyValue) metric.MeasurementOption {
	of := []attribute.KeyValue{attribute.String("consumer", s.Name), attribute.String("queue", s.Queue)}
	return metric.WithAttributeSet(attribute.NewSet(append(of, more...)...))
}

// errorf returns an error with the prefix of the transport.
func (s *settings) errorf(format string, args ...any) error {
	return fmt.Errorf(s.Package+": "+format, args...)
}

// deadLetters adds the dead letters that stopped their keys to the transport's dead letters.
func (s *settings) deadLetters(transport driver.DeadLetters) driver.DeadLetters {
	if s.parker == nil {
		return transport
	}
	return driver.JoinDeadLetters(transport, s.parker.Parked())
}
