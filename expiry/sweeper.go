package expiry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// ErrNotReady is returned by Ready while no sweep has gone through lately.
var ErrNotReady = errors.New("expiry: sweeper not ready")

// Sweeper expires what is due in a Store. Make it with NewSweeper. It is safe
// for concurrent use.
type Sweeper struct {
	store      Store
	cfg        SweeperConfig
	policy     backoff.Policy
	telemetry  telemetry
	quarantine *quarantine

	slot chan struct{} // held while a sweep runs
	size int           // of a batch; only who holds slot may touch it
	wake chan struct{} // one pending Wake

	mu      sync.Mutex
	running int   // calls of Run
	health  error // of the last contact with the store
	last    time.Time
}

// NewSweeper returns a Sweeper on store.
func NewSweeper(store Store, cfg SweeperConfig) (*Sweeper, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	if store == nil {
		err = errors.Join(errors.New("expiry: store is nil"), err)
	}
	if cfg.Schedule == nil {
		schedule, cronErr := Cron(DefaultSchedule)
		cfg.Schedule, err = schedule, errors.Join(err, cronErr)
	}
	if err != nil {
		return nil, err
	}
	tel, err := newTelemetry(cfg)
	if err != nil {
		return nil, err
	}
	return &Sweeper{
		store:      store,
		cfg:        cfg,
		policy:     backoff.Policy{Base: min(time.Second, cfg.MaxBackoff), Max: cfg.MaxBackoff, Jitter: 0.5},
		telemetry:  tel,
		quarantine: newQuarantine(cfg.Quarantine, cfg.MaxQuarantine),
		slot:       make(chan struct{}, 1),
		size:       cfg.BatchSize,
		wake:       make(chan struct{}, 1),
		health:     errors.New("no sweep yet"),
	}, nil
}

// Run sweeps at once, on the schedule, when the next row falls due and after
// Wake, until ctx is cancelled; the batch in hand then has ShutdownTimeout to
// finish. It returns nil. A failing store is logged and tried again, with
// growing pauses.
func (s *Sweeper) Run(ctx context.Context) error {
	s.setRunning(1)
	defer s.setRunning(-1)
	failures := 0
	rest := s.cfg.MinPause
	for {
		scheduled := s.cfg.Schedule.Next(time.Now())
		report, err := s.Sweep(ctx)
		if report.Expired > 0 {
			rest = s.cfg.MinPause
		}
		if err == nil {
			var overdue bool
			overdue, err = s.awaitDue(ctx, scheduled, rest)
			rest = s.nextRest(rest, overdue)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			failures = 0
			continue
		}
		if s.pauseAfter(ctx, err, failures) != nil {
			return nil
		}
		failures++
	}
}

// longestRest bounds the rest between sweeps for rows that others hold.
const longestRest = time.Second

// nextRest is the rest after a sweep that is begun because something is overdue.
// It grows as long as such sweeps get nothing: somebody else holds the rows.
func (s *Sweeper) nextRest(rest time.Duration, overdue bool) time.Duration {
	if !overdue {
		return s.cfg.MinPause
	}
	return max(s.cfg.MinPause, min(2*rest, longestRest))
}

// pauseAfter logs a passing fault and leaves the store alone for a while.
func (s *Sweeper) pauseAfter(ctx context.Context, err error, failures int) error {
	pause := max(s.policy.Delay(failures, s.cfg.Rand()), s.cfg.MinPause)
	s.cfg.Logger.WarnContext(ctx, "expiry: store failed, trying again",
		slog.String("sweeper", s.cfg.Name), slog.Any("error", err), slog.Duration("pause", pause))
	return runloop.Sleep(ctx, pause)
}

// awaitDue rests, and returns when it is time to sweep: on the schedule, or
// because the store says that something is due, or is overdue already.
func (s *Sweeper) awaitDue(ctx context.Context, scheduled time.Time, rest time.Duration) (overdue bool, err error) {
	for {
		if err := runloop.Sleep(ctx, time.Until(s.lastContact().Add(rest))); err != nil {
			return false, err
		}
		due, ok, err := s.nextDue(ctx)
		if err != nil {
			return false, err
		}
		if ok && due <= 0 {
			return true, nil
		}
		if elapsed, err := s.pause(ctx, due, ok, scheduled); elapsed || err != nil {
			return false, err
		}
		rest = s.cfg.MinPause
	}
}

// pause waits for the next due time or the schedule and returns true then. It
// returns false when it is better to look for the next due time again: after
// Wake, or when nothing is due for long.
func (s *Sweeper) pause(ctx context.Context, due time.Duration, ok bool, scheduled time.Time) (bool, error) {
	wait, sweep := s.cfg.Recheck, false
	if ok && due <= wait {
		wait, sweep = due, true
	}
	if !scheduled.IsZero() && time.Until(scheduled) <= wait {
		wait, sweep = time.Until(scheduled), true
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-timer.C:
		return sweep, nil
	case <-s.wake:
		return false, nil
	}
}

// nextDue is the store's answer, or the end of the first quarantine if that
// comes earlier.
func (s *Sweeper) nextDue(ctx context.Context) (due time.Duration, ok bool, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("expiry: panic in store: %v", p)
		}
		s.contact(ctx, err)
	}()
	bounded, cancel := context.WithTimeout(ctx, s.cfg.BatchTimeout)
	defer cancel()
	skip, release := s.quarantine.current(time.Now())
	due, ok, err = s.store.NextDue(bounded, skip)
	if err != nil {
		return 0, false, fmt.Errorf("expiry: next due time: %w", err)
	}
	if len(skip) > 0 && (!ok || release < due) {
		due, ok = release, true
	}
	return due, ok, nil
}

// Wake says that rows may have been made or changed, so that the next due time
// is looked up again. Call it after the commit. It never blocks; calls that come
// close together count as one.
func (s *Sweeper) Wake() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Ready returns nil while Run is running and its last contact with the store
// went well, else an error that wraps ErrNotReady.
func (s *Sweeper) Ready(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running == 0 {
		return fmt.Errorf("%w: not running", ErrNotReady)
	}
	if s.health != nil {
		return fmt.Errorf("%w: %w", ErrNotReady, s.health)
	}
	return nil
}

// contact notes how the store answered. What a cancelled caller gets says
// nothing about the store.
func (s *Sweeper) contact(ctx context.Context, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = time.Now()
	if err == nil || ctx.Err() == nil {
		s.health = err
	}
}

func (s *Sweeper) lastContact() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

func (s *Sweeper) setRunning(change int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running += change
}
