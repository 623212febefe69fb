// Package engine consumes: it has the messages of a driver.Source processed and settles them by
// what became of them. It does everything that is not the broker's own: workers, batches and order,
// retries and dead letters, the ledger, pauses while a server is down, and the end in good order.
// Transports wrap its Consumer in their own; programs use those.
//
// One goroutine, the loop, owns all state and decides; it does no I/O. The others do I/O and own
// nothing: the receiver has the session, the workers run the processor, the acker acknowledges and
// gives back, the mover takes failed messages elsewhere, the watcher tells of limits, and one counts
// the dead letters for a gauge.
package engine

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Consumer hands the messages of one source to a Processor and settles them by its answers. Its
// methods may be called from any goroutine.
type Consumer struct {
	cfg       *settings
	source    driver.Source
	processor inbox.Processor
	signals   *signals
	status    atomic.Pointer[status] // of the run; nil: none
	running   atomic.Bool
}

// New returns a consumer of a source. A processor with deduplication brings its ledger along, and
// Run has it do its work in the background. The error names every violation in cfg. Nothing is asked
// of a server yet.
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
	signals, err := newSignals(s, source)
	if err != nil {
		return nil, s.errorf("%w", err)
	}
	return &Consumer{cfg: s, source: source, processor: processor, signals: signals}, nil
}

// Run consumes until ctx is cancelled or a limit of the Config is reached. Then it takes no
// more messages, gives those back that are not begun, lets the others finish, settles them and
// returns nil, after ShutdownTimeout at the latest. The broker may be down when it starts, or
// go down later: Run goes on trying. Calling it while it runs is an error, and so are settings that
// cannot work with the processor; see driver.Unworkable.
func (c *Consumer) Run(ctx context.Context) error {
	if err := driver.Unworkable(c.cfg.ConsumerConfig, c.processor); err != nil {
		return c.cfg.errorf("run: %w", err)
	}
	if !c.running.CompareAndSwap(false, true) {
		return c.cfg.errorf("Run is running already")
	}
	defer c.running.Store(false)
	defer c.signals.observe()()
	r := newRun(ctx, c)
	c.status.Store(r.loop.status)
	defer c.status.Store(nil)
	r.serve()
	return nil
}

// Watch does the part of Run that several consumers on one processor need only once: it counts dead
// letters for the gauge, and has the processor do its work in the background. It blocks until ctx ends.
func (c *Consumer) Watch(ctx context.Context) {
	var counting sync.WaitGroup
	counting.Go(func() { c.signals.depths.run(ctx) })
	if c.cfg.background != nil {
		c.cfg.background.Background(ctx)
	}
	counting.Wait()
}

// Ready returns nil while messages are being received, failed ones have a place to go, and handlers
// return in time. The error says what is not so: why there is no session, which place has refused a
// failed message within about a minute, or how many handlers overrun their time.
func (c *Consumer) Ready(ctx context.Context) error {
	shown := c.status.Load()
	if shown == nil {
		return c.cfg.errorf("not running")
	}
	return shown.ready(ctx, c.source.Ready)
}

// run is one call of Run: the loop, and the goroutines that work for it.
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

	stop     context.Context // done: take no more messages
	halt     context.CancelFunc
	work     context.Context // of the handlers
	abort    context.CancelCauseFunc
	finished context.Context // done: nothing may wait any more
	end      context.CancelFunc
	over     chan struct{} // closed: the loop reads no more events

	settling sync.WaitGroup // acker and mover
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
	acks, removals, wishes := make(chan *settlement), make(chan *removal), make(chan wish, 1)
	post := func(ev event) {
		select { // the usual case first: it costs less
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
	r.workers = &workers{cfg: cfg, processor: c.processor, signals: c.signals, tracker: r.tracker, ctx: r.work, jobs: jobs, post: post}
	r.acker = &acker{signals: c.signals, ctx: r.finished, work: acks, post: post}
	r.mover = &mover{cfg: cfg, source: c.source, signals: c.signals, tracker: r.tracker, ctx: r.finished, work: removals, post: post}
	r.receiver = &receiver{cfg: cfg, source: c.source, signals: c.signals, wishes: wishes, post: post, ctx: r.finished}

	l := &loop{
		cfg: cfg, signals: c.signals, status: &status{cfg: cfg}, hand: newHand(cfg), trial: newTrial(cfg), pause: &pause{cfg: cfg, halted: cfg.pausable != nil},
		drain:  &drain{halt: r.halt, abort: r.abort, abandon: r.abandon},
		events: events, jobs: jobs, acks: acks, removals: removals, timer: time.NewTimer(time.Hour),
	}
	l.timer.Stop()
	l.overruns = &overruns{cfg: cfg, signals: c.signals, limits: &l.hand.queues.limits, pause: l.pause}
	l.receipts = &receipts{cfg: cfg, hand: l.hand, signals: c.signals, next: &settlement{}, spare: &settlement{}}
	l.moves = &moves{cfg: cfg, hand: l.hand, receipts: l.receipts}
	l.outages = &outages{cfg: cfg, hand: l.hand, trial: l.trial, pause: l.pause, moves: l.moves}
	l.concluder = &concluder{
		cfg: cfg, hand: l.hand, trial: l.trial, pause: l.pause, outages: l.outages, receipts: l.receipts, moves: l.moves,
	}
	l.control = &control{cfg: cfg, hand: l.hand, pause: l.pause, drain: l.drain, receipts: l.receipts, moves: l.moves, ctx: r.finished, wishes: wishes}
	r.loop = l
	return r
}

// serve runs everything. It returns ShutdownTimeout after the stop at the latest, whatever hangs.
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
		r.cfg.Logger.Error("ShutdownTimeout is over: what hangs is left behind")
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
		watch(r.stop, r.cfg, r.workers.post)
		r.workers.post(event{kind: halted})
	})
	if r.cfg.pausable != nil {
		r.others.Go(func() {
			r.cfg.pausable.WatchPause(r.stop, func(p driver.Pause) { r.workers.post(event{kind: switched, by: p}) })
		})
	}
}

// abandon leaves handlers behind.
func (r *run) abandon() {
	r.cfg.Logger.Error("handlers ignore the end of their context and are left behind")
	r.settling.Go(r.tracker.abandoned)
}

// finish waits for what the loop has started.
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
