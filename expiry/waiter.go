package expiry

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
	kit "github.com/holdfast-go/holdfast/internal/telemetry"
)

// waiter finds out when to sweep next, and waits for it.
type waiter struct {
	s     *Sweeper
	alarm *alarm
	rest  time.Duration // to leave the store alone for, after a contact

	next     time.Time // when to sweep for what is due; zero if there is nothing
	look     time.Time // when to look again
	stored   time.Time // look by the store's clock
	overdue  bool      // the last sweep was begun for what was overdue already
	faults   kit.Seldom
	skewTold bool // the log says that this host's clock is wrong
	nullTold bool // the log says that rows have no deadline
}

// longestRest bounds the rest between sweeps for rows that others hold.
const longestRest = time.Second

// await returns when it is time to sweep again: on the schedule, or because the
// store says that something is due.
func (w *waiter) await(ctx context.Context, scheduled time.Time, done Report) error {
	w.settle(done)
	for {
		if err := runloop.Sleep(ctx, time.Until(w.s.lastContact().Add(w.rest))); err != nil {
			return err
		}
		if err := w.ask(ctx); err != nil {
			return err
		}
		if w.overdue {
			return nil
		}
		w.rest = w.s.tuning.minPause
		if sweep, err := w.pause(ctx, scheduled); sweep || err != nil {
			return err
		}
	}
}

// settle draws conclusions from the last sweep: one that was begun for overdue
// rows and got none was in the way of somebody who holds them.
func (w *waiter) settle(done Report) {
	if w.overdue && done.Expired == 0 {
		w.rest = max(w.s.tuning.minPause, min(2*w.rest, longestRest))
	} else {
		w.rest = w.s.tuning.minPause
	}
	w.overdue = false
}

// forget has the next await begin afresh: the sweep has failed.
func (w *waiter) forget() { w.overdue, w.rest = false, w.s.tuning.minPause }

// shortestPause is how long a store that has failed is left alone even if a wake-up
// says that it works.
const shortestPause = time.Second

// pauseAfter logs a passing fault and leaves the store alone for a while.
func (w *waiter) pauseAfter(ctx context.Context, err error, failures int) error {
	w.alarm.clear()
	pause := max(w.s.backoff.Delay(failures, w.s.cfg.Rand()), w.s.tuning.minPause)
	if repeats, ok := w.faults.Due(); ok {
		w.s.cfg.Logger.WarnContext(ctx, "expiry: sweep failed, trying again", slog.String("sweeper", w.s.cfg.Name),
			slog.Any("error", err), slog.Duration("pause", pause), slog.Int("repeats", repeats))
	}
	if err := runloop.Sleep(ctx, min(pause, shortestPause)); err != nil || pause <= shortestPause {
		return err
	}
	w.alarm.arm(time.Time{}.Add(1)) // for an unknown time only
	defer w.alarm.disarm()
	timer := time.NewTimer(pause - shortestPause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
	case <-w.alarm.ring:
	}
	return nil
}

// ask looks for the next due time.
func (w *waiter) ask(ctx context.Context) error {
	w.alarm.clear()
	var o driver.Outlook
	asked := time.Now()
	err := w.s.bounded(ctx, "look", func(ctx context.Context) (err error) {
		o, err = w.s.store.Look(ctx, w.s.suspects.skip())
		return err
	})
	w.s.contact(ctx, err)
	if err != nil {
		return fmt.Errorf("expiry: look for the next due time: %w", err)
	}
	now := time.Now()
	w.note(ctx, o, asked.Add(now.Sub(asked)/2).Sub(o.Now))
	due, pending := o.Due, o.Pending
	if again, ok := w.s.suspects.due(now); ok && (!pending || again < due) {
		due, pending = again, true
	}
	w.next, w.look, w.stored = time.Time{}, now.Add(w.s.cfg.PollInterval), o.Now.Add(w.s.cfg.PollInterval)
	if pending && due <= w.s.cfg.PollInterval {
		w.next = now.Add(due)
	}
	w.overdue = pending && due <= 0
	return nil
}

// bigSkew is a difference between two clocks that the log reports.
const bigSkew = time.Minute

// note reports what a look has shown.
func (w *waiter) note(ctx context.Context, o driver.Outlook, skew time.Duration) {
	w.s.telemetry.look(ctx, w.s.cfg.Name, o, skew)
	big := skew.Abs() >= bigSkew
	if big && !w.skewTold {
		w.s.cfg.Logger.WarnContext(ctx, "expiry: this host's clock is wrong by a minute or more, going by the store's, which decides",
			slog.String("sweeper", w.s.cfg.Name), slog.Duration("skew", skew))
	}
	w.skewTold = big
	if o.Undated > 0 && !w.nullTold {
		w.s.cfg.Logger.WarnContext(ctx, "expiry: active rows have no deadline and never expire, the next start will refuse them",
			slog.String("sweeper", w.s.cfg.Name), slog.Int("rows", o.Undated))
	}
	w.nullTold = o.Undated > 0
}

// pause waits for the next due time or the schedule and returns true then. It
// returns false when it is better to look again: after a wake-up, or when
// nothing has been due for long.
func (w *waiter) pause(ctx context.Context, scheduled time.Time) (sweep bool, err error) {
	until := w.look
	if !w.next.IsZero() {
		until, sweep = w.next, true
	}
	if !scheduled.IsZero() && !scheduled.After(until) {
		until, sweep = scheduled, true
	}
	w.s.telemetry.plan(ctx, w.s.cfg.Name, until)
	w.alarm.arm(w.stored.Add(until.Sub(w.look)))
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	defer w.alarm.disarm()
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-timer.C:
		return sweep, nil
	case <-w.alarm.ring:
		return false, nil
	}
}

// alarm wakes a sweeper that waits for a moment, by the store's clock, if there
// is something to do before it. It keeps what comes in while nobody waits.
type alarm struct {
	ring chan struct{}

	mu    sync.Mutex
	until time.Time // what is waited for; zero while nobody waits
	early bool      // something came in
	at    time.Time // the earliest time that did; zero if one was unknown
}

func newAlarm() *alarm { return &alarm{ring: make(chan struct{}, 1)} }

// set rings if at, or an unknown time if it is zero, comes before what is waited for.
func (a *alarm) set(at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.early || at.Before(a.at) {
		a.early, a.at = true, at
	}
	if !a.until.IsZero() {
		a.settle()
	}
}

// arm begins to wait until then.
func (a *alarm) arm(until time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.until = until
	a.settle()
}

// settle rings for what came in, or forgets it because it has time.
func (a *alarm) settle() {
	if a.early && a.at.Before(a.until) {
		select {
		case a.ring <- struct{}{}:
		default:
		}
	}
	a.early = false
}

// disarm ends the wait. What rings unheard is forgotten: a look follows.
func (a *alarm) disarm() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.until = time.Time{}
	select {
	case <-a.ring:
	default:
	}
}

// clear forgets what came in: a look is about to see it.
func (a *alarm) clear() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.early = false
}
