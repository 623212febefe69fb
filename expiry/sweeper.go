package expiry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/backoff"
)

// Sweeper expires what is due in a store. Make it with NewSweeper. It is safe
// for concurrent use.
type Sweeper struct {
	store     driver.Store
	cfg       SweeperConfig
	schedule  schedule
	tuning    tuning
	backoff   backoff.Policy
	telemetry telemetry
	suspects  *suspects

	// slot is held while a sweep runs. Its holder alone uses left.
	slot chan struct{}
	left leftover

	mu     sync.Mutex
	alarms map[*alarm]struct{} // one for each call of Run
	health error               // of the last contact with the store
	last   time.Time           // of that contact
}

// leftover is what one sweep leaves to the next.
type leftover struct {
	fit    bool          // the store has been found fit to be swept
	size   int           // of a batch
	cursor driver.Cursor // where the sweep was stopped
	doubts int           // sweeps in a row that ended with a row alone that was not to blame
	works  bool          // rows have expired since a batch was too slow
}

// NewSweeper returns a Sweeper on a store, such as that of expirypgx.New or
// expirytest.New. It asks no server.
func NewSweeper(store driver.Store, cfg SweeperConfig) (*Sweeper, error) {
	cfg = cfg.withDefaults()
	schedule, scheduleErr := parseSchedule(cfg.Schedule)
	err := errors.Join(scheduleErr, cfg.validate())
	if store == nil {
		err = errors.Join(errors.New("expiry: store is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	tel, err := newTelemetry(cfg)
	if err != nil {
		return nil, err
	}
	s := &Sweeper{
		store:     store,
		cfg:       cfg,
		schedule:  schedule,
		telemetry: tel,
		alarms:    map[*alarm]struct{}{},
		slot:      make(chan struct{}, 1),
		left:      leftover{size: cfg.BatchSize},
		health:    errors.New("no sweep yet"),
	}
	s.tune(defaultTuning)
	return s, nil
}

func (s *Sweeper) tune(t tuning) {
	s.tuning = t
	s.backoff = backoff.Policy{Base: min(time.Second/2, t.maxBackoff), Max: t.maxBackoff, Jitter: 0.5}
	s.suspects = newSuspects(s.cfg.Quarantine, t.maxQuarantine)
}

// Run sweeps at once, on the schedule, when the next row falls due and when the
// store says that a row was made, until ctx is cancelled. The batch in hand then has
// ShutdownTimeout to finish, and Run returns nil. A failing store is logged and
// tried again, with growing pauses.
//
// The only error is that the store must be mended first: a table or an index is
// missing, say. Nothing has been changed then. Each finding in the error has a
// method Mend() string.
func (s *Sweeper) Run(ctx context.Context) error {
	w := waiter{s: s, alarm: newAlarm(), rest: s.tuning.minPause}
	s.begin(w.alarm)
	defer s.end(w.alarm)
	defer s.background(ctx)()
	failures := 0
	for {
		scheduled := s.schedule.Next(time.Now())
		report, err := s.Sweep(ctx)
		if isFinding(err) {
			return err
		}
		if err != nil && report.Batches > 0 {
			failures = 0 // the store works, and other rows must not wait
		}
		if err == nil {
			err = w.await(ctx, scheduled, report)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			failures = 0
			continue
		}
		w.forget()
		if w.pauseAfter(ctx, err, failures) != nil {
			return nil
		}
		failures++
	}
}

// background starts what the store does beside sweeps. The returned function ends
// it and waits for its end.
func (s *Sweeper) background(ctx context.Context) (stop func()) {
	store, ok := s.store.(driver.Background)
	if !ok {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		store.Background(ctx, s.wake)
	}()
	return func() {
		cancel()
		<-ended
	}
}

// wake says that a row was made or changed that now falls due at that time, or at an
// unknown one if at is zero. It never blocks, and costs nothing unless at comes before
// the next look anyway; the sweeper then looks at once. An unknown time also ends the
// pause after a failed sweep: its sender may have found the store to work.
func (s *Sweeper) wake(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for a := range s.alarms {
		a.set(at)
	}
}

// Ready returns nil while Run is running and its last contact with the store
// went well, else an error that says why not.
func (s *Sweeper) Ready(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.alarms) == 0 {
		return errors.New("expiry: sweeper not ready: not running")
	}
	if s.health != nil {
		return fmt.Errorf("expiry: sweeper not ready: %w", s.health)
	}
	return nil
}

// Check returns what the store finds missing or wrong, or nil. Findings are joined;
// each has a method Mend() string that says how to put it right. Any other error in
// it says that the store could not look. Nothing is changed.
func (s *Sweeper) Check(ctx context.Context) error {
	if store, ok := s.store.(interface{ Check(context.Context) error }); ok {
		return store.Check(ctx)
	}
	if store, ok := s.store.(driver.Fit); ok {
		return store.Fit(ctx)
	}
	return nil
}

// isFinding reports whether err names something to mend, and is no failure to look.
func isFinding(err error) bool {
	var finding interface {
		error
		Mend() string
	}
	return errors.As(err, &finding)
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

func (s *Sweeper) begin(a *alarm) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alarms[a] = struct{}{}
}

func (s *Sweeper) end(a *alarm) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.alarms, a)
}

// errTooSlow is inside the error of a batch that ran into BatchTimeout.
var errTooSlow = errors.New("expiry: batch ran into BatchTimeout")

// stuckAfter is how long after its deadline a call counts as stuck.
const stuckAfter = 5 * time.Second

// bounded gives a call of the store BatchTimeout, and reports one that ignores it.
// A panic is an error.
func (s *Sweeper) bounded(ctx context.Context, what string, call func(context.Context) error) (err error) {
	bounded, cancel := context.WithTimeoutCause(ctx, s.cfg.BatchTimeout, errTooSlow)
	defer cancel()
	stuck := time.AfterFunc(s.cfg.BatchTimeout+stuckAfter, func() {
		s.contact(ctx, fmt.Errorf("%s is stuck: it ignores its deadline", what))
		s.cfg.Logger.ErrorContext(ctx, "expiry: stuck, a call ignores its deadline",
			slog.String("sweeper", s.cfg.Name), slog.String("call", what), slog.Duration("deadline", s.cfg.BatchTimeout))
	})
	defer stuck.Stop()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("expiry: panic in store: %v", p)
		}
	}()
	return call(bounded)
}
