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

// waiter determines the time of the next sweep and waits for it.
type waiter struct {
	s     *Sweeper
	alarm *alarm
	rest  time.Duration // shortest time between two contacts with the store

	next     time.Time // when the next row falls due; zero if none is known
	look     time.Time // when to query again
	stored   time.Time // the same by the store's clock
	overdue  bool      // the last sweep was started for overdue rows
	faults   kit.Seldom
	skewTold bool // the wrong clock has been logged
	nullTold bool // rows without a deadline have been logged
}

// longestRest limits the pause between sweeps for rows that others hold.
const longestRest = time.Second

// await returns at the time of the next sweep: on the schedule, or because a row is due.
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

// settle adjusts the pause after the last sweep. A sweep for overdue rows that expired none was probably blocked by
// another transaction.
func (w *waiter) settle(done Report) {
	if w.overdue && done.Expired == 0 {
		w.rest = max(w.s.tuning.minPause, min(2*w.rest, longestRest))
	} else {
		w.rest = w.s.tuning.minPause
	}
	w.overdue = false
}

// forget resets the waiter after a failed sweep.
func (w *waiter) forget() { w.overdue, w.rest = false, w.s.tuning.minPause }

// shortestPause is the shortest pause after a failure of the store, even if a wake-up shows that it works.
const shortestPause = time.Second

// pauseAfter logs a temporary failure and waits before the next try.
func (w *waiter) pauseAfter(ctx context.Context, err error, failures int) error {
	w.alarm.clear()
	pause := max(w.s.backoff.Delay(failures, w.s.cfg.Rand()), w.s.tuning.minPause)
	if repeats, ok := w.faults.Due(); ok {
		w.s.cfg.Logger.WarnContext(ctx, "expiry: sweep failed", slog.String("sweeper", w.s.cfg.Name),
			slog.Any("error", err), slog.Duration("pause", pause), slog.Int("repeats", repeats))
	}
	if err := runloop.Sleep(ctx, min(pause, shortestPause)); err != nil || pause <= shortestPause {
		return err
	}
	w.alarm.arm(time.Time{}.Add(1)) // only for an unknown time
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

// ask queries the next due time.
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
		return fmt.Errorf("expiry: query next due time: %w", err)
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

// bigSkew is the clock difference from which it is logged.
const bigSkew = time.Minute

// note records and logs the result of a query.
func (w *waiter) note(ctx context.Context, o driver.Outlook, skew time.Duration) {
	w.s.telemetry.look(ctx, w.s.cfg.Name, o, skew)
	big := skew.Abs() >= bigSkew
	if big && !w.skewTold {
		w.s.cfg.Logger.WarnContext(ctx, "expiry: host clock differs from the store's clock",
			slog.String("sweeper", w.s.cfg.Name), slog.Duration("skew", skew))
	}
	w.skewTold = big
	if o.Undated > 0 && !w.nullTold {
		w.s.cfg.Logger.WarnContext(ctx, "expiry: active rows without a deadline never expire",
			slog.String("sweeper", w.s.cfg.Name), slog.Int("rows", o.Undated))
	}
	w.nullTold = o.Undated > 0
}

// pause waits for the next due time or the schedule, and then returns true. It returns false if the sweeper should
// query again: after a wake-up, or at the end of the poll interval.
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

// alarm wakes a sweeper that waits until a time by the store's clock, if there is work before that time. It keeps
// wake-ups that arrive while nobody waits.
type alarm struct {
	ring chan struct{}

	mu    sync.Mutex
	until time.Time // end of the wait; zero while nobody waits
	early bool      // a wake-up has arrived
	at    time.Time // earliest time of the wake-ups; zero if one was unknown
}

func newAlarm() *alarm { return &alarm{ring: make(chan struct{}, 1)} }

// set rings if at, or an unknown time if at is zero, is before the end of the wait.
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

// arm starts to wait until that time.
func (a *alarm) arm(until time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.until = until
	a.settle()
}

// settle rings for earlier wake-ups, and drops later ones.
func (a *alarm) settle() {
	if a.early && a.at.Before(a.until) {
		select {
		case a.ring <- struct{}{}:
		default:
		}
	}
	a.early = false
}

// disarm ends the wait. It drops a ring that nobody received, because a query follows.
func (a *alarm) disarm() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.until = time.Time{}
	select {
	case <-a.ring:
	default:
	}
}

// clear drops the wake-ups, because a query follows.
func (a *alarm) clear() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.early = false
}
