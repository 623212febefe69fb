package outbox

import (
	"context"
	"log/slog"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// maxRounds is the number of batches in flight at once: one is published, the next is claimed and the
// previous one is settled. Each batch has its own lanes, so no key is in two batches. The other lanes stay
// free for other relays.
const maxRounds = 3

// dispatcher claims batches and publishes and settles a few of them at once. Only one goroutine may call
// its methods.
type dispatcher struct {
	rounds *rounds
	wake   bell
	spans  spans
	limit  int // the maximum number of messages to publish or fail; 0: no limit

	ended   chan round
	running int // rounds in flight
	claimed int // the number of messages in these rounds
	report  Report
	err     error         // why a round could not be settled
	refused error         // why the store could not record outcomes, by its last answer
	due     time.Duration // until a parked message is ready, as last returned by the store; 0: none
	woken   bool          // nothing was claimed since the last wake-up
	polled  bool          // the next claim is a poll, without a wake-up
	left    bool          // since the last claim, a round ended that left messages to claim
	untold  time.Time     // when a poll last found messages without a wake-up
	alone   bool          // messages are suspect: the next round starts after all others have ended
	lost    time.Time     // until then, a claim whose reply was lost may hold lanes
}

// bell makes an idle relay poll now. It never blocks. Several rings before the poll cause one poll.
type bell chan struct{}

func (b bell) ring() {
	select {
	case b <- struct{}{}:
	default:
	}
}

// spans are the contexts for the stages of a shutdown. Each context outlives the previous one.
type spans struct {
	life    context.Context // the relay's context: when it ends, the relay shuts down
	confirm context.Context // when it ends, the relay stops waiting for confirms
	work    context.Context // ends ShutdownTimeout after life; until then the relay settles batches
}

// dispatch returns a dispatcher, a function that waits for its rounds, and one that cancels its contexts.
func (r *Relay) dispatch(ctx context.Context, limit int) (d *dispatcher, wait func(), end func()) {
	confirm, cancelConfirm := runloop.Detach(ctx, r.cfg.ShutdownTimeout-r.cfg.storeTimeout())
	work, cancelWork := runloop.Detach(ctx, r.cfg.ShutdownTimeout)
	d = &dispatcher{rounds: r.rounds, wake: r.wake, spans: spans{ctx, confirm, work}, limit: limit, ended: make(chan round, maxRounds)}
	wait = func() {
		for d.running > 0 {
			d.take(<-d.ended)
		}
	}
	return d, wait, func() {
		cancelConfirm()
		cancelWork()
	}
}

// serve claims and publishes until ctx ends.
func (d *dispatcher) serve(ctx context.Context, pauseDelay func(failures int) time.Duration) {
	health, log := d.rounds.health, d.rounds.log
	failures := 0
	for ctx.Err() == nil {
		health.setLooking(true)
		found, err := d.next(ctx)
		switch {
		case err != nil:
			health.setLooking(false)
			failures++
			log(ctx, slog.LevelWarn, "outbox: store unavailable", "", slog.Int("failures", failures), slog.Any("error", err))
			_ = runloop.Sleep(ctx, pauseDelay(failures))
		case !found:
			failures = 0
			d.idle(ctx)
		default:
			failures = 0
		}
	}
}

// lastCall serves a wake-up from before the end of Run, because its sender woke no other relay. The claimed
// batch may use half of the time that is left for confirms.
func (d *dispatcher) lastCall(wait func()) {
	select {
	case <-d.wake:
	default:
		if !d.woken {
			return
		}
	}
	ctx, cancel := context.WithTimeout(d.spans.confirm, (d.rounds.cfg.ShutdownTimeout-d.rounds.cfg.storeTimeout())/2)
	defer cancel()
	defer wait()
	if _, err := d.next(ctx); err != nil {
		d.rounds.log(ctx, slog.LevelWarn, "outbox: store unavailable", "", slog.Any("error", err))
	}
}

// handOver wakes another relay if this one left messages to claim.
func (d *dispatcher) handOver() {
	if source, ok := d.rounds.source.(driver.Waking); ok && d.left {
		source.Wake()
	}
}

// next claims one batch and starts its round, when a round is free. After ctx ends, the round sends no more
// messages. It returns false if nothing more can be claimed now, and an error if the store could not be
// reached.
func (d *dispatcher) next(ctx context.Context) (bool, error) {
	d.makeRoom()
	if err := d.err; err != nil {
		d.err = nil
		return false, err
	}
	if d.size() == 0 || d.rounds.transports.allPaused() > 0 {
		d.due = 0 // no transport could publish it
		return false, nil
	}
	d.woken, d.left = false, false
	alone := d.running == 0
	batch, begin, err := d.claim(alone)
	if err != nil {
		return false, err
	}
	d.due, d.refused = batch.Due, batch.Refused
	d.alone = batch.Suspect
	if d.polled && len(batch.Messages) > 0 {
		d.untold = time.Now()
	}
	d.polled = false
	if len(batch.Leases) == 0 {
		return batch.More || d.alone && !alone, nil
	}
	d.running++
	d.claimed += len(batch.Messages)
	go func() { d.ended <- d.rounds.run(ctx, d.spans, batch, begin) }()
	return batch.More || d.alone || d.size() == 0, nil // with size 0, a round may still release messages and free room
}

// claim returns a batch and the earliest time, by our own clock, at which its leases started. A relay retries after
// its next pause. A Drain would end instead, so it tries twice here: another connection may work.
func (d *dispatcher) claim(alone bool) (driver.Batch, time.Time, error) {
	begin := time.Now()
	batch, err := d.rounds.claim(d.spans.work, d.size(), alone, begin)
	if err == nil || d.limit == 0 || d.spans.life.Err() != nil {
		return batch, begin, err
	}
	d.rounds.log(d.spans.work, slog.LevelWarn, "outbox: store unavailable", "", slog.Int("failures", 1), slog.Any("error", err))
	begin = time.Now()
	d.lost = begin.Add(d.rounds.cfg.LeaseTTL)
	batch, err = d.rounds.claim(d.spans.work, d.size(), alone, begin)
	return batch, begin, err
}

// makeRoom takes ended rounds. It waits for one if no other round may start before that.
func (d *dispatcher) makeRoom() {
	for d.running > 0 {
		if d.running == maxRounds || d.alone || d.size() == 0 {
			d.take(<-d.ended)
			continue
		}
		select {
		case r := <-d.ended:
			d.take(r)
		default:
			return
		}
	}
}

// size is the maximum number of messages in the next batch.
func (d *dispatcher) size() int {
	size := d.rounds.cfg.BatchSize
	if d.limit > 0 {
		size = min(size, d.limit-d.report.Published-d.report.Failed-d.claimed)
	}
	return size
}

func (d *dispatcher) take(r round) {
	d.running--
	d.claimed -= r.claimed
	d.report.Published += r.published
	d.report.Failed += r.failed
	d.report.Dead += r.dead
	d.left = d.left || r.more
	d.refused = r.refused
	if r.err != nil {
		d.err = r.err
	}
}

// idle waits for the first of: a wake-up, the end of a round that left messages to claim, a due parked message, the
// end of a lease or of a lost claim, the end of a pause, the next poll.
func (d *dispatcher) idle(ctx context.Context) {
	wait := d.poll()
	for _, sooner := range []time.Duration{d.due, time.Until(d.lost), d.rounds.transports.nextResume()} {
		if sooner > 0 {
			wait = min(wait, sooner)
		}
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case r := <-d.ended:
			d.take(r)
			if r.more || d.limit > 0 { // a Drain may end after its last round
				return
			}
		case <-d.wake:
			d.woken = true
			return
		case <-timer.C:
			d.polled = wait >= d.rounds.cfg.PollInterval
			return
		}
	}
}

const (
	// heardPolls is the number of PollIntervals between two polls while the store notifies of commits.
	heardPolls = 5
	// untoldFor is the time with normal polling after a poll found messages without a wake-up.
	untoldFor = time.Minute
)

// poll returns the time until the next poll. The longer interval is shorter than a lease, so that the relay sees the
// leases of a killed relay before they expire. While a transport is paused, wake-ups may have been rejected because
// of it, so the relay polls at the normal rate. Nothing wakes a Drain.
func (d *dispatcher) poll() time.Duration {
	poll := d.rounds.cfg.PollInterval
	source, ok := d.rounds.source.(driver.Hearing)
	told := d.untold.IsZero() || time.Since(d.untold) >= untoldFor
	if ok && told && d.limit == 0 && source.Hears() && d.rounds.transports.paused() == nil {
		return max(poll, min(heardPolls*poll, d.rounds.cfg.LeaseTTL*5/6))
	}
	return poll
}
