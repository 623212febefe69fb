package outbox

import (
	"context"
	"log/slog"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// maxRounds is how many batches are in flight at once: while one is published, the next is claimed
// and the one before is settled. A batch has lanes of its own, so that no key is in two of them; and
// enough lanes are left for other relays.
const maxRounds = 3

// dispatcher claims batches and has a few of them published and settled at once. Its methods belong
// to one goroutine.
type dispatcher struct {
	rounds *rounds
	wake   bell
	spans  spans
	limit  int // the most messages to publish or fail; 0: no limit

	ended   chan round
	running int // rounds in flight
	claimed int // their messages
	report  Report
	err     error         // of a round that could not be settled
	due     time.Duration // until a parked message is ready, as the store said last; 0: none is
	woken   bool          // nothing was claimed since the last wake-up
	polled  bool          // no wake-up asked for the look that is next
	left    bool          // a round has left something to find since the last claim
	untold  time.Time     // when a poll last found messages without a wake-up
	alone   bool          // nothing begins until all rounds have ended: messages are under suspicion
	lost    time.Time     // until then a claim without an answer may hold lanes
}

// bell makes an idle relay look for messages at once. It never blocks, and many calls cost one look.
type bell chan struct{}

func (b bell) ring() {
	select {
	case b <- struct{}{}:
	default:
	}
}

// spans are for how long the parts of a relay's work go on. Each context outlives the one before it.
type spans struct {
	life    context.Context // the relay's: when it ends, the relay shuts down
	confirm context.Context // when it ends, no confirm is waited for any more
	work    context.Context // ends ShutdownTimeout after life: until then batches are settled
}

// dispatch returns a dispatcher, and the function that waits for its rounds.
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

// lastCall honours a wake-up that came before the end of Run: whoever woke this relay has told no
// other. What it claims has half of the time that is left for confirms.
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

// handOver tells another relay of what this one has left.
func (d *dispatcher) handOver() {
	if source, ok := d.rounds.source.(driver.Waking); ok && d.left {
		source.Wake()
	}
}

// next claims one batch and sets it going, when there is room for one more. When ctx ends, the batch
// sends nothing more. False: there is nothing more to do now. An error means that the store was not
// reached.
func (d *dispatcher) next(ctx context.Context) (bool, error) {
	d.makeRoom()
	if err := d.err; err != nil {
		d.err = nil
		return false, err
	}
	if d.size() == 0 || d.rounds.transports.allPaused() > 0 {
		d.due = 0 // nothing could be done with it
		return false, nil
	}
	d.woken, d.left = false, false
	alone := d.running == 0
	batch, begin, err := d.claim(alone)
	if err != nil {
		return false, err
	}
	d.due = batch.Due
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
	return batch.More || d.alone || d.size() == 0, nil // in the end, what is given back is within the limit again
}

// claim returns a batch, and when its leases began at the earliest, by our own clock. A Drain does not come back soon, as
// a relay does, and so tries twice: another connection may answer.
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

// makeRoom takes the rounds that have ended, and waits for one if no other may begin before.
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

// size is how many messages the next batch may have.
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
	if r.err != nil {
		d.err = r.err
	}
}

// idle waits for a wake-up, for the end of a round that leaves something to find, or until a parked message is due, a
// lease, a lost claim's too, or a pause ends, or the next poll.
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
			if r.more || d.limit > 0 { // a Drain ends with its last round
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
	// heardPolls is how many PollIntervals are between two looks while the store reports commits.
	heardPolls = 5
	// untoldFor is for how long they are not, after a look found messages without a wake-up.
	untoldFor = time.Minute
)

// poll returns the time to the next look that nothing asks for. A lease of a relay that was killed is seen before it ends,
// and while a transport is paused wake-ups may have been refused for its sake. A Drain is not woken.
func (d *dispatcher) poll() time.Duration {
	poll := d.rounds.cfg.PollInterval
	source, ok := d.rounds.source.(driver.Hearing)
	told := d.untold.IsZero() || time.Since(d.untold) >= untoldFor
	if ok && told && d.limit == 0 && source.Hears() && d.rounds.transports.paused() == nil {
		return max(poll, min(heardPolls*poll, d.rounds.cfg.LeaseTTL*5/6))
	}
	return poll
}
